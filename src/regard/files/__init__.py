"""Files: atomic writes, open folders, the cache, safetensors and other untrusted files."""
