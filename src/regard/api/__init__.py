"""Everything that the command line can do, in Python.

One module per group of functions; each is imported when one of its names is first used, so that
`import regard` and `regard --help` do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api.run import Run, load
    from regard.api.training import (
        Study,
        configure,
        import_model,
        open_study,
        resume,
        resume_events,
        train,
        train_events,
    )

MODULES = {
    "regard.api.run": ["Run", "load"],
    "regard.api.training": [
        "Study",
        "configure",
        "import_model",
        "open_study",
        "resume",
        "resume_events",
        "train",
        "train_events",
    ],
}
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}

__all__ = [
    "Run",
    "Study",
    "configure",
    "import_model",
    "load",
    "open_study",
    "resume",
    "resume_events",
    "train",
    "train_events",
]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'regard.api' has no attribute {name!r}")
    return getattr(import_module(MODULE_OF[name]), name)
