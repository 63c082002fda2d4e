"""The largest difference between the logits of regard and transformers, per model type.

    python bench/parity.py

Small random models, three right-padded rows of different lengths, float32. Prints the largest
absolute difference over all positions that are not padding, and the largest absolute logit.
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
VALID = torch.arange(11) < LENGTHS.unsqueeze(1)


def main() -> None:
    """Print a line for each model."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    ids = torch.randint(1, 61, (3, 11)).masked_fill(~VALID, 0)
    with torch.no_grad():
        for name in NAMES:
            hf_model = small(name)
            model = convert(hf_model)
            expected = hf_model(ids, attention_mask=VALID.long()).logits[VALID]
            print_difference(name, expected, model.head(model(ids))[VALID])
        for name, architecture in encoders.ENCODERS + encoders.WRITERS + encoders.READERS:
            hf_model = encoders.small(name, architecture)
            for output, expected, actual in encoders.results(hf_model, convert(hf_model)):
                print_difference(f"{name} {architecture} {output}", expected, actual)
        hf_model = test_vit.small("ViTForImageClassification")
        model = convert(hf_model)
        for size in (24, 32, 16):
            images = torch.randn(2, 3, size, size)
            expected = hf_model(images, interpolate_pos_encoding=True).logits
            print_difference(f"vit {size} x {size}", expected, model.head(model(images)))


def convert(hf_model: Any) -> Any:
    """Save a transformers model and load it with regard."""
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        return open_checkpoint(folder).load().eval()


def print_difference(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    difference = (expected - actual).abs().max().item()
    print(f"{name:62} {difference:.1e}   of {expected.abs().max().item():.1f}")


if __name__ == "__main__":
    main()
