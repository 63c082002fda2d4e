"""How far our logits are from those of `transformers`, for a small random model of each family.

    python bench/parity.py

Three rows of different length, padded on the right; float32; the largest difference over all
real positions, and how large the logits are.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hub import small_encoders as encoders
from hub.small import NAMES, small
from regard.hub.folder import open_folder

LENGTHS = torch.tensor([11, 7, 4])
REAL = torch.arange(11) < LENGTHS.unsqueeze(1)


def main() -> None:
    """Print a line for each model."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    ids = torch.randint(1, 61, (3, 11)).masked_fill(~REAL, 0)
    for name in NAMES:
        theirs = small(name)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = open_folder(folder).load().eval()
        with torch.no_grad():
            wanted = theirs(ids, attention_mask=REAL.long()).logits[REAL]
            found = ours.head(ours(ids))[REAL]
        furthest = (wanted - found).abs().max().item()
        print(f"{name:20} {furthest:.1e}   of {wanted.abs().max().item():.1f}")
    for name, architecture in encoders.ENCODERS + encoders.WRITERS + encoders.READERS:
        theirs = encoders.small(name, architecture)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = open_folder(folder).load().eval()
        with torch.no_grad():
            for what, wanted, found in encoders.results(theirs, ours):
                furthest = (wanted - found).abs().max().item()
                label = f"{name} {architecture} {what}"
                print(f"{label:62} {furthest:.1e}   of {wanted.abs().max().item():.1f}")


if __name__ == "__main__":
    main()
