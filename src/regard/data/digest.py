"""Digests of the content of datasets."""

import hashlib
import json


def json_digest(*values: object) -> str:
    """The sha256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
