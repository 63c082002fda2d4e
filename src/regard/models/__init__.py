"""Models: configurations and the modules they describe."""
