"""How fast word vectors are learned beside gensim's, in turns on the same words.

    python bench/cbow.py TEXT [--turns 3]

CBOW of 100 numbers with 5 noise words and 5 neighbours to either side. Ours by
`training.loop.train`, with all that it does beside the arithmetic; gensim's compiled loop with one
worker, without leaving out frequent words or shrinking windows at random, as we do neither. In
seconds of the processor, so that nobody else on the machine counts. The medians count, and five
neighbours of a frequent name tell that both have learned something.
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

from regard.explain.neighbours import WordVectors
from regard.models.build import build_model, preset
from regard.tasks import CBOWTask, Objective
from regard.text import train_tokenizer
from regard.training.loop import train
from regard.training.optim import optimizers

TIME, ROWS = 64, 128


def measured(pass_over: Callable[[], object], words: int) -> float:
    """Words a second."""
    began = time.process_time()
    pass_over()
    return words / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", default="napoleon")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.text.read_text(encoding="utf-8")
    tokenizer = train_tokenizer({"kind": "word", "size": 20_000, "lower": True}, [text])
    ids = np.array(tokenizer.encode(text))
    ids = ids[: len(ids) // (TIME * ROWS) * TIME * ROWS].reshape(-1, ROWS, TIME)
    words = ids.size

    model = build_model(preset("cbow", vocab_size=tokenizer.size))
    batches = [CBOWTask().collate((block, block), torch.Generator()) for block in ids]
    model.count_words(batches)
    learners = optimizers({"kind": "adamw", "decay": 0.0}, model, 5e-3)
    steps = train(
        Objective(model, CBOWTask()), itertools.cycle(batches), learners, lambda step: 5e-3
    )
    sentences = [[tokenizer.piece(id) for id in row] for row in ids.reshape(-1, TIME)]
    peer = Word2Vec(
        vector_size=100,
        window=5,
        negative=5,
        sg=0,
        sample=0,
        min_count=1,
        shrink_windows=False,
        workers=1,
    )
    peer.build_vocab(sentences)

    def theirs() -> None:
        peer.train(sentences, total_examples=len(sentences), epochs=1)

    def ours() -> None:
        for _ in batches:
            next(steps)

    turns = [(measured(ours, words), measured(theirs, words)) for _ in range(options.turns)]
    for name, speeds in zip(("regard", "gensim"), zip(*turns, strict=True), strict=True):
        print(f"{name}  {statistics.median(speeds):,.0f} words a second")
    ratio = statistics.median(mine / other for mine, other in turns)
    print(f"ratio   {ratio:.2f}")
    near = WordVectors.from_model(model, tokenizer).nearest([(1.0, options.words)], 5)
    print(f"regard  {options.words}: {', '.join(word for word, _ in near)}")
    near = peer.wv.most_similar(options.words, topn=5)
    print(f"gensim  {options.words}: {', '.join(word for word, _ in near)}")


if __name__ == "__main__":
    main()
