"""Metrics of a run: read back, and sent to trackers."""
