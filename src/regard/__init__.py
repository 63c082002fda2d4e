"""regard: sequence models from n-grams to the Transformer, each defined by a small configuration.

>>> import regard
>>> regard.preset("gpt2").layers
12
"""

import os
import sys
from typing import TYPE_CHECKING, Any

# By default a thread of libgomp, torch's OpenMP runtime, waits for other threads by spinning for
# many milliseconds. On a busy machine it then occupies a core that those threads need. libgomp
# reads this variable when torch is loaded.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from regard.api import (
        Run,
        Study,
        compare,
        diff,
        doctor,
        edit,
        export,
        import_model,
        info,
        load,
        merge,
        plan,
        preset,
        resume,
        settings,
        show,
        train,
    )

__all__ = [
    "Run",
    "Study",
    "compare",
    "diff",
    "doctor",
    "edit",
    "export",
    "import_model",
    "info",
    "load",
    "merge",
    "plan",
    "preset",
    "resume",
    "settings",
    "show",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import torch only when one of these names is first used: `regard --help` does not need it."""
    if name in __all__:
        from regard import api

        return getattr(api, name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return list(__all__)
