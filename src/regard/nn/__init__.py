"""Building blocks: torch modules with plain arguments, each with its formula."""
