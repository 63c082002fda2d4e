"""From what the user gives to a run's settings, device and size."""
