"""Files: atomic writes, directory descriptors, the cache, safetensors and other untrusted files."""
