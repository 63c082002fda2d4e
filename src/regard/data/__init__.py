"""From a path to batches of ids: sources, stores of tokens, loaders; no model is known here."""
