"""From a path to the examples of a batch: data sets, token stores, loaders; no models."""
