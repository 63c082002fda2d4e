"""The run folder on disk: checkpoints, evaluations, lock, settings stored with weights."""
