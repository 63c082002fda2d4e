"""Train and score translation on Multi30k: BLEU of val, test2016, test2017 and MSCOCO.

    REGARD_DATA=… python bench/multi30k.py train en de [key=value …] --out runs/en-de
    REGARD_DATA=… python bench/multi30k.py write runs/en-de en de --beam 5 > en-de.json
    python bench/multi30k.py score en-de.json

Training and writing need a fast machine, scoring needs sacreBLEU; they may be two machines.
"""

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path

SETS = {
    "val": "val",
    "test2016": "test_2016_flickr",
    "test2017": "test_2017_flickr",
    "mscoco": "test_2017_mscoco",
}


def lines(name: str, language: str) -> list[str]:
    path = Path(os.environ["REGARD_DATA"], "multi30k", f"{name}.{language}.gz")
    return gzip.open(path, "rt", encoding="utf-8").read().splitlines()


def train(source: str, target: str, out: str, words: list[str]) -> None:
    import regard
    from regard.training.events import Evaluated

    folder = f"{os.environ['REGARD_DATA']}/multi30k"
    began = time.perf_counter()

    def watch(event: object) -> None:
        if isinstance(event, Evaluated):
            spent = time.perf_counter() - began
            print(
                f"{spent:6.0f} s  step {event.step}  loss {event.metrics['loss']:.4f}",
                event.sample.splitlines()[1],
                file=sys.stderr,
                flush=True,
            )

    data = [
        f'data.source="{folder}/train.{source}.gz"',
        f'data.target="{folder}/train.{target}.gz"',
    ]
    data.append(f'data.validation=["{folder}/val.{source}.gz", "{folder}/val.{target}.gz"]')
    regard.train("translate-multi30k", *data, *words, out=out, on_event=watch)
    print(f"trained in {time.perf_counter() - began:.0f} s", file=sys.stderr)


def write(run: str, source: str, target: str, beam: int, penalty: float, names: list[str]) -> None:
    import regard

    loaded = regard.load(run)
    began = time.perf_counter()
    written = {
        name: {
            "written": loaded.translate(
                lines(SETS[name], source), beam=beam, length_penalty=penalty
            ),
            "wanted": lines(SETS[name], target),
        }
        for name in names
    }
    print(f"wrote in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    json.dump(written, sys.stdout, ensure_ascii=False)


def score(path: str) -> None:
    from regard.tasks.metrics import bleu

    for name, texts in json.loads(Path(path).read_text()).items():
        number, signature = bleu(texts["written"], texts["wanted"], lower=True)
        print(f"{Path(path).stem:20} {name:10} {number:6.2f}  {signature}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("train")
    one.add_argument("source"), one.add_argument("target"), one.add_argument("--out", required=True)
    one.add_argument("words", nargs="*")
    two = verbs.add_parser("write")
    two.add_argument("run"), two.add_argument("source"), two.add_argument("target")
    (
        two.add_argument("--beam", type=int, default=5),
        two.add_argument("--penalty", type=float, default=1.0),
    )
    two.add_argument("--sets", default=",".join(SETS))
    three = verbs.add_parser("score")
    three.add_argument("paths", nargs="+")
    chosen = parser.parse_args()
    if chosen.verb == "train":
        train(chosen.source, chosen.target, chosen.out, chosen.words)
    elif chosen.verb == "write":
        write(
            chosen.run,
            chosen.source,
            chosen.target,
            chosen.beam,
            chosen.penalty,
            chosen.sets.split(","),
        )
    else:
        for each in chosen.paths:
            score(each)
