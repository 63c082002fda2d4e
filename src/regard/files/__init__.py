"""Files: atomic writes and reading of untrusted content."""
