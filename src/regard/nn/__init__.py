"""The parts: torch modules with plain arguments, each one idea and its formula."""
