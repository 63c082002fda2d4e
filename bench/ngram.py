"""How fast n-grams are counted: order 5 with modified Kneser–Ney, in tokens a second.

    python bench/ngram.py TEXT [--size 8000] [--order 5] [--tokens 4000000] [--turns 3]

TEXT is a file; its sub-words (BPE, of `--size`) are repeated, with other ids in a few places of
a hundred, until there are `--tokens`: a longer text would have more grams than the same one again.
The peer of the same work is counting in dicts of tuples, on the first 200,000 tokens. Seconds are
of the wall and of the processor: where others use the machine, the second is what to look at.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from regard.data.batch import TextBatch
from regard.data.text import Text
from regard.models.ngram import NGram, NGramConfig
from regard.pipelines import open_data
from regard.text import train_tokenizer

ROWS, CONTEXT, CHANGED, PEER = 64, 256, 0.03, 200_000


def ids_of(path: str, size: int, tokens: int) -> tuple[np.ndarray, int, int]:
    """The ids of a text, repeated; how many it has itself; the size of its vocabulary."""
    text = open_data(path)
    assert isinstance(text, Text)
    pieces = [piece for piece, _ in text.chunks()]
    tokenizer = train_tokenizer({"kind": "bpe", "size": size}, iter(pieces), total=text.size)
    own = np.concatenate([np.asarray(tokenizer.encode(piece)) for piece in pieces])
    random = np.random.default_rng(1)
    ids = np.tile(own, -(-tokens // len(own)))[:tokens]
    changed = random.random(len(ids)) < CHANGED
    changed[: len(own)] = False
    ids[changed] = random.choice(own, changed.sum())
    return ids.astype(np.int64), len(own), tokenizer.size


def blocks(ids: np.ndarray) -> list[TextBatch]:
    """The batches that `regard train` would count."""
    rows = torch.from_numpy(ids[: (len(ids) - 1) // CONTEXT * CONTEXT + 1]).unfold(
        0, CONTEXT + 1, CONTEXT
    )
    return [TextBatch(each[:, :-1], each[:, 1:]) for each in rows.split(ROWS)]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall and of the processor."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def in_dicts(ids: list[int], order: int) -> list[Counter[tuple[int, ...]]]:
    return [Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for n in range(1, order + 1)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("text")
    options.add_argument("--size", type=int, default=8000)
    options.add_argument("--order", type=int, default=5)
    options.add_argument("--tokens", type=int, default=4_000_000)
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    ids, own, vocab = ids_of(given.text, given.size, given.tokens)
    print(f"{own:,} tokens of {given.text}, {vocab:,} different; order {given.order}")
    print(f"{torch.get_num_threads()} threads\n{'':32}{'wall':>12}{'processor':>12}")
    config = NGramConfig(vocab_size=vocab, order=given.order, smoothing="kneser_ney")
    for name, part in (("the text itself", ids[:own]), (f"{given.tokens:,} tokens", ids)):
        batches = blocks(part)
        model = NGram(config)
        best = min(measured(lambda m=model, b=batches: m.fit(b)) for _ in range(given.turns))
        grams = sum(len(table.keys) for table in model._tables())
        told = "".join(f"{len(part) / seconds / 1e6:10.2f} M" for seconds in best)
        print(f"{name:32}{told}  tokens a second; {grams:,} grams")
    peer = ids[:PEER].tolist()
    told = "".join(
        f"{PEER / seconds / 1e6:10.2f} M"
        for seconds in measured(lambda: in_dicts(peer, given.order))
    )
    print(f"{'dicts of tuples, counts only':32}{told}  tokens a second")


if __name__ == "__main__":
    main()
