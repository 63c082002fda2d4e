"""Drawing of attention maps, curves and diagrams, for the terminal and for files."""
