"""Training speed of CBOW word vectors, compared with gensim on the same words.

    python bench/cbow.py TEXT [--repeats 5]

CBOW with dim 100, 5 negative samples and a window of 5. regard uses `training.loop.train` with the
default batch of a text of 3.3 MB, gensim its compiled loop with one worker, without subsampling of
frequent words and with fixed windows, as regard does. Every token is counted as a word. Both are
timed alternately, one epoch each, in CPU time, so that other load on the machine matters less;
medians and extremes are printed. The five nearest neighbours of a frequent word show that both
models have learned.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gensim.models import Word2Vec

from regard.accel.cpu_memory import keep_freed_memory
from regard.explain.neighbours import WordVectors
from regard.models.build import build_model, preset
from regard.tasks import CBOWTask
from regard.text import train_tokenizer
from regard.training.loop import Objective, train
from regard.training.optim import optimizers

TIME, ROWS = 64, 411


def words_per_second(run_epoch: Callable[[], object], words: int) -> float:
    """Time one epoch in CPU time."""
    start = time.process_time()
    run_epoch()
    return words / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--words", default="napoleon")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `regard train` does
    text = options.text.read_text(encoding="utf-8")
    tokenizer = train_tokenizer({"kind": "word", "vocab_size": 20_000, "lower": True}, [text])
    ids = np.array(tokenizer.encode(text))
    ids = ids[: len(ids) // (TIME * ROWS) * TIME * ROWS].reshape(-1, ROWS, TIME)
    words = ids.size

    model = build_model(preset("cbow", vocab_size=tokenizer.vocab_size))
    batches = [CBOWTask().collate((block, block), torch.Generator()) for block in ids]
    model.set_noise_distribution(batches)
    adamw = optimizers({"kind": "adamw", "weight_decay": 0.0}, model, 2e-2)
    steps = train(Objective(model, CBOWTask()), itertools.cycle(batches), adamw, lambda step: 2e-2)
    sentences = [[tokenizer.piece(id) for id in row] for row in ids.reshape(-1, TIME)]
    word2vec = Word2Vec(
        vector_size=100,
        window=5,
        negative=5,
        sg=0,
        sample=0,
        min_count=1,
        shrink_windows=False,
        workers=1,
    )
    word2vec.build_vocab(sentences)

    def gensim_epoch() -> None:
        word2vec.train(sentences, total_examples=len(sentences), epochs=1)

    def regard_epoch() -> None:
        for _ in batches:
            next(steps)

    repeats = [
        (words_per_second(regard_epoch, words), words_per_second(gensim_epoch, words))
        for _ in range(options.repeats)
    ]
    ratios = [ours / theirs for ours, theirs in repeats]
    for name, speeds in zip(("regard", "gensim"), zip(*repeats, strict=True), strict=True):
        low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
        print(f"{name}  {middle:,.0f} words/s ({low:,.0f} to {high:,.0f})")
    print(f"ratio   {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    near = WordVectors.from_model(model, tokenizer).nearest([(1.0, options.words)], 5)
    print(f"regard  {options.words}: {', '.join(word for word, _ in near)}")
    near = word2vec.wv.most_similar(options.words, topn=5)
    print(f"gensim  {options.words}: {', '.join(word for word, _ in near)}")


if __name__ == "__main__":
    main()
