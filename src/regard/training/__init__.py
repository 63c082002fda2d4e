"""Training: from data and settings to a run folder, step by step."""
