"""Speed of fitting an n-gram model: order 5, modified Kneser-Ney, in tokens per second.

    python bench/ngram.py TEXT [--vocab-size 8000] [--order 5] [--tokens 4000000] [--repeats 3]

The BPE tokens of the file TEXT are repeated until there are `--tokens`. 3 % of the repeated tokens
are replaced at random, because a longer text would also have more distinct n-grams. For comparison,
the first 200,000 tokens are counted in Python dicts of tuples. Wall-clock and CPU time are printed;
CPU time does not depend on other load on the machine.
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

ROWS, CONTEXT, REPLACED, DICT_TOKENS = 64, 256, 0.03, 200_000


def repeated_ids(path: str, vocab_size: int, tokens: int) -> tuple[np.ndarray, int, int]:
    """The repeated ids of a text, the number of ids before repetition, and the vocabulary size."""
    text = open_data(path)
    assert isinstance(text, Text)
    pieces = [piece for piece, _ in text.chunks()]
    choice = {"kind": "bpe", "vocab_size": vocab_size}
    tokenizer = train_tokenizer(choice, iter(pieces), total_bytes=text.size)
    text_ids = np.concatenate([np.asarray(tokenizer.encode(piece)) for piece in pieces])
    random = np.random.default_rng(1)
    ids = np.tile(text_ids, -(-tokens // len(text_ids)))[:tokens]
    replaced = random.random(len(ids)) < REPLACED
    replaced[: len(text_ids)] = False
    ids[replaced] = random.choice(text_ids, replaced.sum())
    return ids.astype(np.int64), len(text_ids), tokenizer.vocab_size


def blocks(ids: np.ndarray) -> list[TextBatch]:
    """The batches on which `regard train` would fit the model."""
    rows = torch.from_numpy(ids[: (len(ids) - 1) // CONTEXT * CONTEXT + 1]).unfold(
        0, CONTEXT + 1, CONTEXT
    )
    return [TextBatch(part[:, :-1], part[:, 1:]) for part in rows.split(ROWS)]


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def count_in_dicts(ids: list[int], order: int) -> list[Counter[tuple[int, ...]]]:
    return [Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for n in range(1, order + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ids, text_size, vocab = repeated_ids(options.text, options.vocab_size, options.tokens)
    print(f"{text_size:,} tokens in {options.text}, vocabulary {vocab:,}; order {options.order}")
    print(f"{torch.get_num_threads()} threads\n{'':32}{'wall clock':>12}{'CPU time':>12}")
    config = NGramConfig(vocab_size=vocab, order=options.order, smoothing="kneser_ney")
    for name, part in (("text, once", ids[:text_size]), (f"{options.tokens:,} tokens", ids)):
        batches = blocks(part)
        model = NGram(config)
        best = min(measure(lambda m=model, b=batches: m.fit(b)) for _ in range(options.repeats))
        ngrams = sum(len(table.keys) for table in model._tables())
        speeds = "".join(f"{len(part) / seconds / 1e6:10.2f} M" for seconds in best)
        print(f"{name:32}{speeds}  tokens/s; {ngrams:,} distinct n-grams")
    dict_ids = ids[:DICT_TOKENS].tolist()
    speeds = "".join(
        f"{DICT_TOKENS / seconds / 1e6:10.2f} M"
        for seconds in measure(lambda: count_in_dicts(dict_ids, options.order))
    )
    print(f"{'dicts of tuples, counts only':32}{speeds}  tokens/s")


if __name__ == "__main__":
    main()
