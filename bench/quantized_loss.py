"""The loss and greedy ids of stories260K, or of a run, with int8 and int4 weights, on a CPU.

    REGARD_DATA=… python bench/quantized_loss.py
    python bench/quantized_loss.py --run runs/my --text FILE

The weights of the blocks are quantized as `regard generate --int8` and `--int4` do it (with int4
the head has 8 bits) and dequantized; the model is computed in float32. The text is 64 samples of
the model, of 200 tokens at temperature 1, or for a run the first tokens of FILE. Prints nats per
token, the mean KL divergence of the next-token distributions from those of the original weights,
and the number of greedy ids before the first that differs.
"""

import argparse
import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import regard.api as regard
from regard.accel.packed import PackedLinear
from regard.generate import generate, parse_chain

TOKENS, SAMPLES = 200, 64


def with_quantized_weights(model: Any, name: str) -> Any:
    """A copy of a model whose weights are quantized and dequantized."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.decoder.blocks:
            for module in block.modules():
                if type(module) is torch.nn.Linear:
                    _quantize_and_dequantize(module, name)
        if not model.config.tied:
            _quantize_and_dequantize(model.head, "int8")
    return model


def _quantize_and_dequantize(layer: Any, name: str) -> None:
    packed = PackedLinear(layer.weight.detach())
    packed = packed.quantize_int4() if name == "int4" else packed.quantize_int8()
    layer.weight.copy_(packed.dequantize(torch.float32)[:, : layer.weight.shape[1]])


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The distributions of ids[:, 1:], each given the ids before it."""
    rows = [model.head(model(row[:, :-1])).log_softmax(-1) for row in ids.split(8)]
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        if options.run is None:
            source = Path(os.environ["REGARD_DATA"]) / "weights" / "stories260k"
            run = regard.import_model(source, Path(parent) / "run")
        else:
            run = regard.load(options.run)
    model = run.model.cpu().float().eval()
    if options.run is None:
        prompts = [[1]] * SAMPLES
        chain = parse_chain(["temperature=1"])
        ids = torch.tensor(generate(model, prompts, chain, max_new_tokens=TOKENS, seed=1))
        ids = torch.cat((torch.ones(SAMPLES, 1, dtype=torch.long), ids), 1)
    else:
        text = run.tokenizer.encode(options.text.read_text(encoding="utf-8"))
        length = min(TOKENS, model.context) + 1
        ids = torch.tensor(text[: len(text) // length * length]).view(-1, length)[:SAMPLES]
    reference = log_probabilities(model, ids)
    greedy = parse_chain(["greedy"])
    first = generate(model, [ids[0, :1].tolist()], greedy, max_new_tokens=TOKENS, seed=1)[0]
    for name in ("", "int8", "int4"):
        other = with_quantized_weights(model, name) if name else model
        scores = log_probabilities(other, ids)
        loss = F.nll_loss(scores.flatten(0, 1), ids[:, 1:].flatten())
        divergence = (reference.exp() * (reference - scores)).sum(-1).mean()
        new = generate(other, [ids[0, :1].tolist()], greedy, max_new_tokens=TOKENS, seed=1)[0]
        equal = next((n for n, (a, b) in enumerate(zip(new, first, strict=True)) if a != b), TOKENS)
        print(
            f"{name or 'float32':8} {loss:.4f} nats per token  divergence {divergence:.5f}"
            f"  {equal} of {TOKENS} greedy ids",
            flush=True,
        )


if __name__ == "__main__":
    main()
