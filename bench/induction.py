"""Induction heads: train a decoder on repeated sequences, find the heads and ablate them.

    python bench/induction.py [--out FOLDER] [--steps N] [--seeds N]

A decoder of four layers reads random tokens and then the same tokens again, with another length in
every batch, so that only the tokens determine where to copy from. For each seed:

- `find_heads` scores every head; induction heads are those above 0.4, previous-token heads too;
- the accuracy on the second half without the induction heads, without as many other heads that are
  neither (drawn ten times), and without the previous-token heads;
- activation patching: one token of the first half is replaced, so that the model copies the wrong
  token; then the residual stream of the clean run is patched in, at each layer and position.

Prints means and 95 % confidence intervals over the seeds; --out writes the figures.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from regard.explain import (
    AttentionMap,
    AttentionMaps,
    ablate,
    attention_maps,
    draw_maps,
    find_heads,
    patch,
    trace,
)
from regard.explain.render.figure import encode, save
from regard.models.transformer import Transformer, TransformerConfig

VOCAB, LAYERS, HEADS, THRESHOLD = 48, 4, 4, 0.4
CONFIG = TransformerConfig(
    vocab_size=VOCAB, dim=64, layers=LAYERS, heads=HEADS, context=64, position="rotary", ffn_dim=128
)
# Student's t for a confidence interval of 95 %, by the number of seeds
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


def repeated_sequences(rows, length, generator):
    """Random rows of distinct tokens, each followed by itself."""
    scores = torch.rand(rows, VOCAB, generator=generator)
    once = scores.argsort(1)[:, :length]
    return torch.cat([once, once], 1)


def train(seed, steps):
    """A decoder, trained on the second halves."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        length = int(torch.randint(6, 25, (1,), generator=generator))
        ids = repeated_sequences(32, length, generator)
        logits = model.head(model(ids[:, :-1])[:, length:])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model, ids, heads=()):
    """How often the second half is copied while `heads`, pairs of layer and head, are ablated."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    edit = {
        f"decoder.blocks.{layer}.attention.heads_hook": ablate(heads=indices, mean=True)
        for layer, indices in by_layer.items()
    }
    length = ids.shape[1] // 2
    with trace(model, (), edit=edit):
        predicted = model.head(model(ids[:, :-1])[:, length:]).argmax(-1)
    return float((predicted == ids[:, length + 1 :]).float().mean())


@torch.no_grad()
def patching_effects(model, ids):
    """P(answer) of clean and of corrupted rows, and after patching each layer and position.

    Returns the two probabilities, a tensor (layers, time), and the position of the answer.
    """
    length = ids.shape[1] // 2
    prompt, answer_position = ids[:, : length + length // 2], length // 2
    answer = prompt[:, answer_position]
    corrupted = prompt.clone()
    corrupted[:, answer_position] = (answer + 1 + torch.arange(len(ids)) % (VOCAB - 1)) % VOCAB
    hook_points = [
        "decoder.blocks.0.carry_hook",
        *(f"decoder.blocks.{n}.out_hook" for n in range(LAYERS)),
    ]

    def probability(edit=None):
        with trace(model, (), edit=edit or {}):
            logits = model.head(model(corrupted)[:, -1])
        return float(logits.softmax(-1).gather(1, answer.unsqueeze(1)).mean())

    with trace(model, hook_points) as clean:
        probabilities = model.head(model(prompt)[:, -1]).softmax(-1)
    before = float(probabilities.gather(1, answer.unsqueeze(1)).mean())
    rows = [
        [
            probability({hook_point: patch(clean[hook_point], positions=[position])})
            for position in range(prompt.shape[1])
        ]
        for hook_point in hook_points
    ]
    return before, probability(), torch.tensor(rows), answer_position


def interval(values):
    """Mean and half the width of its 95 % confidence interval."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), T95.get(len(values), 1.96) * spread / len(values) ** 0.5


def main():
    """Train, measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results = {}

    def add(name, value):
        results.setdefault(name, []).append(value)

    for seed in range(options.seeds):
        model = train(seed, options.steps)
        generator = torch.Generator().manual_seed(1000 + seed)
        ids = repeated_sequences(256, 20, generator)
        scores = find_heads(model, length=20, seed=seed)
        induction = scores.above("induction", THRESHOLD)
        previous = [h for h in scores.above("previous_token", THRESHOLD) if h not in induction]
        others = [
            (layer, head)
            for layer in range(LAYERS)
            for head in range(HEADS)
            if (layer, head) not in (*induction, *previous)
        ]
        print(f"seed {seed}: induction {induction}, previous token {previous}", flush=True)
        count = min(len(induction), len(others))
        drawn = [
            [others[n] for n in torch.randperm(len(others), generator=generator)[:count]]
            for _ in range(10)
        ]
        add("induction heads", len(induction))
        add("accuracy", accuracy(model, ids))
        add("without the induction heads", accuracy(model, ids, induction))
        add(
            "without as many others",
            statistics.mean(accuracy(model, ids, heads) for heads in drawn),
        )
        add("without the previous-token heads", accuracy(model, ids, previous))
        clean, corrupted, table, answer_position = patching_effects(model, ids[:64])
        add("P(answer), clean text", clean)
        add("P(answer), one token changed", corrupted)
        add("P(answer), embedding of that token patched", float(table[0, answer_position]))
        elsewhere = [
            p for position, p in enumerate(table[0].tolist()) if position != answer_position
        ]
        add("P(answer), any other embedding patched, best", max(elsewhere))
        if options.out is not None and seed == 0:
            draw(options.out, model, ids, scores, table)
    for name, values in results.items():
        mean, half = interval(values)
        print(f"{name:46} {mean:.3f} ± {half:.3f}   {[round(v, 3) for v in values]}")


def draw(folder, model, ids, scores, table):
    """The scores of all heads, the patching and the attention of one row."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = [f"head {n}" for n in range(HEADS)]
    names = ["induction", "previous_token", "duplicate_token"]
    figure = draw_maps(
        torch.stack([scores.scores[name] for name in names]),
        [f"layer {n}" for n in range(LAYERS)],
        heads,
        headings=names,
        title="scores of the heads",
    )
    save(encode(figure, ".svg"), folder / "induction-heads.svg")
    pieces = [str(id) for id in ids[0, : table.shape[1]].tolist()]
    layers = ["embedding", *(f"layer {n}" for n in range(LAYERS))]
    figure = draw_maps(
        table.unsqueeze(0), layers, pieces, headings=["P(answer) after patching"], title="patching"
    )
    save(encode(figure, ".svg"), folder / "induction-patching.svg")
    row = ids[:1]
    maps = attention_maps(model, lambda: model(row))
    tokens = [str(id) for id in row[0].tolist()]
    shown = {name: AttentionMap(tokens, tokens, weights[0]) for name, weights in maps.items()}
    AttentionMaps(shown).save(folder / "induction.html")


if __name__ == "__main__":
    main()
