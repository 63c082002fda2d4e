"""Train translation models on Multi30k and compute BLEU on val, test2016, test2017 and MSCOCO.

    REGARD_DATA=… python bench/multi30k.py train en de [key=value …] --out runs/en-de
    REGARD_DATA=… python bench/multi30k.py translate runs/en-de en de --beam 5 > en-de.json
    python bench/multi30k.py score en-de.json

Scoring needs sacreBLEU and may run on another machine than training and translation.
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


def train(source: str, target: str, out: str, overrides: list[str]) -> None:
    import regard
    from regard.training.events import Evaluated

    folder = f"{os.environ['REGARD_DATA']}/multi30k"
    start = time.perf_counter()

    def print_evaluation(event: object) -> None:
        if isinstance(event, Evaluated):
            seconds = time.perf_counter() - start
            print(
                f"{seconds:6.0f} s  step {event.step}  loss {event.metrics['loss']:.4f}",
                event.sample.splitlines()[1],
                file=sys.stderr,
                flush=True,
            )

    data = [
        f'data.source="{folder}/train.{source}.gz"',
        f'data.target="{folder}/train.{target}.gz"',
    ]
    data.append(f'data.validation=["{folder}/val.{source}.gz", "{folder}/val.{target}.gz"]')
    regard.train("translate-multi30k", *data, *overrides, out=out, on_event=print_evaluation)
    print(f"trained in {time.perf_counter() - start:.0f} s", file=sys.stderr)


def translate(
    run: str, source: str, target: str, beam: int, length_penalty: float, names: list[str]
) -> None:
    import regard

    loaded = regard.load(run)
    start = time.perf_counter()
    translations = {
        name: {
            "hypotheses": loaded.translate(
                lines(SETS[name], source), beam=beam, length_penalty=length_penalty
            ),
            "references": lines(SETS[name], target),
        }
        for name in names
    }
    print(f"translated in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    json.dump(translations, sys.stdout, ensure_ascii=False)


def print_bleu(path: str) -> None:
    from regard.tasks.metrics import bleu

    for name, texts in json.loads(Path(path).read_text()).items():
        score, signature = bleu(texts["hypotheses"], texts["references"], lower=True)
        print(f"{Path(path).stem:20} {name:10} {score:6.2f}  {signature}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train_parser = commands.add_parser("train")
    train_parser.add_argument("source")
    train_parser.add_argument("target")
    train_parser.add_argument("overrides", nargs="*", metavar="key=value")
    train_parser.add_argument("--out", required=True)
    translate_parser = commands.add_parser("translate")
    translate_parser.add_argument("run")
    translate_parser.add_argument("source")
    translate_parser.add_argument("target")
    translate_parser.add_argument("--beam", type=int, default=5)
    translate_parser.add_argument("--length-penalty", type=float, default=1.0)
    translate_parser.add_argument("--sets", default=",".join(SETS))
    score_parser = commands.add_parser("score")
    score_parser.add_argument("paths", nargs="+")
    options = parser.parse_args()
    if options.command == "train":
        train(options.source, options.target, options.out, options.overrides)
    elif options.command == "translate":
        translate(
            options.run,
            options.source,
            options.target,
            options.beam,
            options.length_penalty,
            options.sets.split(","),
        )
    else:
        for path in options.paths:
            print_bleu(path)
