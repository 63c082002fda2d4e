"""Datasets, token stores and loaders: from a path to the examples of a batch."""
