"""The run folder on disk: checkpoints, lock, disk space."""
