"""Pictures of attention, for the terminal and for files."""
