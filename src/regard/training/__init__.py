"""Training runs: loop, optimizers, checkpoints, parallel strategies, trackers."""
