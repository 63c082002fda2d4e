"""Settings, device, checks and time budget of a run."""
