"""regard: the models of the attention lectures, as values of a small configuration.

>>> import regard
>>> regard.preset("gpt2").layers
12
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import Run, import_model, load, resume, train
    from regard.models.build import preset

__all__ = ["Run", "import_model", "load", "preset", "resume", "train"]


def __getattr__(name: str) -> Any:
    """Import torch only when something is asked for: `regard --help` has no need of it."""
    if name == "preset":
        from regard.models.build import preset

        return preset
    if name in __all__:
        from regard import api

        return getattr(api, name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
