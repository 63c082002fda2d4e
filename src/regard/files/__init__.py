"""Files: atomic writes, the cache, reading of untrusted files."""
