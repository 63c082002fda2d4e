"""Numbers that left the finite ones: told with what was read, and never saved.

The loop leaves weights and optimizer alone in a step whose loss or gradient is not finite. Here
stands what the host does about it, when it learns of it.
"""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from regard.errors import DivergedError
from regard.training.storage.run_folder import RunFolder

TOLERATED = 3  # steps in a row that may be skipped, less one


class Skips:
    """Counts the steps that were skipped in a row, and keeps what each of them read."""

    def __init__(
        self, folder: RunFolder, example_ids: Callable[[int], list[int]], accumulate: int
    ) -> None:
        self.folder, self.example_ids, self.accumulate = folder, example_ids, accumulate
        self.in_a_row = 0

    def see(self, number: int, loss: float, norm: float, lr: float, *, skipped: bool) -> None:
        """Take in a step; a skipped one too many in a row ends the training."""
        if not skipped:
            self.in_a_row = 0
            return
        parts = range(number * self.accumulate, (number + 1) * self.accumulate)
        self.folder.add_skip(
            {
                "step": number + 1,
                "loss": _json(loss),
                "grad_norm": _json(norm),
                "samples": [id for part in parts for id in self.example_ids(part)],
            }
        )
        self.in_a_row += 1
        if self.in_a_row >= TOLERATED:
            raise DivergedError(
                f"loss or gradient was not finite in {TOLERATED} steps in a row, up to step "
                f"{number + 1:,}; the weights were left alone\n"
                f"what those steps read stands in {self.folder.skipped}\n{_way_out(self.folder)}"
                f" (now {lr:.2g})"
            )


def must_be_finite(folder: RunFolder, step: int, *groups: Mapping[str, Tensor]) -> None:
    """Refuse to judge or save what is not finite: the checkpoint before is worth more."""
    named = ((name, tensor) for group in groups for name, tensor in group.items())
    broken = [name for name, tensor in named if not tensor.isfinite().all()]
    if broken:
        more = f" and {len(broken) - 1} more are" if len(broken) > 1 else " is"
        raise DivergedError(
            f"{broken[0]}{more} not finite at step {step:,}; nothing was saved\n{_way_out(folder)}"
        )


def _way_out(folder: RunFolder) -> str:
    return f"go on from the last checkpoint, more slowly: regard resume {folder.path} train.lr=…"


def _json(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else str(value)
