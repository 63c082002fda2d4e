"""Write pairs of English captions, each with the similarity of their French translations.

    REGARD_DATA=… python bench/similarity.py OUT
    regard train OUT/train.csv data.validation=OUT/validation.csv --out runs/similarity
    regard evaluate runs/similarity OUT/test.csv

Writes train.csv, validation.csv and test.csv with the columns sentence1, sentence2 and similarity,
from Multi30k: chrF of the two French sentences, in both directions, divided by 100. A model sees
the English only. The partner of half of the sentences is the one of 300 others that shares most
words with it, of the other half a random one. Needs sacreBLEU.
"""

import csv
import gzip
import os
import sys
from pathlib import Path
from random import Random

from sacrebleu.metrics import CHRF

PARTS = {"train": ("train", 8000), "validation": ("val", 1000), "test": ("test_2016_flickr", 1000)}
CANDIDATES = 300


def lines(part: str, language: str) -> list[str]:
    path = Path(os.environ["REGARD_DATA"], "multi30k", f"{part}.{language}.gz")
    return gzip.open(path, "rt", encoding="utf-8").read().splitlines()


def overlap(a: str, b: str) -> float:
    one, other = set(a.lower().split()), set(b.lower().split())
    return len(one & other) / len(one | other)


def similarity(a: str, b: str, metric: CHRF) -> float:
    scores = [metric.sentence_score(x, [y]).score for x, y in ((a, b), (b, a))]
    return round(sum(scores) / 200, 3)


def write(path: Path, part: str, count: int) -> None:
    english, french = lines(part, "en"), lines(part, "fr")
    random, metric = Random(1), CHRF()
    chosen = random.sample(range(len(english)), min(count, len(english)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "similarity"])
        for number, i in enumerate(chosen):
            others = [j for j in random.sample(range(len(english)), CANDIDATES + 1) if j != i]
            j = others[0]
            if number % 2:
                j = max(others, key=lambda j: overlap(english[i], english[j]))
            writer.writerow([english[i], english[j], similarity(french[i], french[j], metric)])


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, (part, count) in PARTS.items():
        write(out / f"{name}.csv", part, count)
