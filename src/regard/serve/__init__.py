"""Serving: an engine that batches the requests of many clients, and an HTTP server around it."""
