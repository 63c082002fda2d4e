"""How far our logits are from those of `transformers`, for a small random model of each family.

    python bench/parity.py

Three rows of different length, padded on the right; float32; the largest difference over all
real positions, and how large the logits are.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hub import small_encoders as encoders
from hub import test_vit
from hub.small import NAMES, small
from regard.hub.external_checkpoint import open_checkpoint

LENGTHS = torch.tensor([11, 7, 4])
REAL = torch.arange(11) < LENGTHS.unsqueeze(1)


def main() -> None:
    """Print a line for each model."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    ids = torch.randint(1, 61, (3, 11)).masked_fill(~REAL, 0)
    with torch.no_grad():
        for name in NAMES:
            theirs = small(name)
            ours = opened(theirs)
            wanted = theirs(ids, attention_mask=REAL.long()).logits[REAL]
            tell(name, wanted, ours.head(ours(ids))[REAL])
        for name, architecture in encoders.ENCODERS + encoders.WRITERS + encoders.READERS:
            theirs = encoders.small(name, architecture)
            for what, wanted, found in encoders.results(theirs, opened(theirs)):
                tell(f"{name} {architecture} {what}", wanted, found)
        theirs = test_vit.small("ViTForImageClassification")
        ours = opened(theirs)
        for size in (24, 32, 16):
            images = torch.randn(2, 3, size, size)
            wanted = theirs(images, interpolate_pos_encoding=True).logits
            tell(f"vit {size} x {size}", wanted, ours.head(ours(images)))


def opened(theirs: Any) -> Any:
    """Their model, by way of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return open_checkpoint(folder).load().eval()


def tell(name: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
    furthest = (wanted - found).abs().max().item()
    print(f"{name:62} {furthest:.1e}   of {wanted.abs().max().item():.1f}")


if __name__ == "__main__":
    main()
