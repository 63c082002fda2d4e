"""Metrics of a run: read from its log, and sent to experiment trackers."""
