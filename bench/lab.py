"""Train the five models of the recipe `lab` at the same time on one GPU, and score them.

    REGARD_DATA=… python bench/lab.py train OUT [key=value …]
    REGARD_DATA=… python bench/lab.py score OUT

`train` writes runs to OUT/runs and, for each model, OUT/NAME.json: its translations of test2016,
one sentence with the attention to its words, and the time. `score` needs sacreBLEU and may run on
another machine: it prints the table, and draws BLEU by length and the alignments into OUT.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("rnn", "gru", "attention", "self-attention", "transformer")
SENTENCE = "a young girl in a red dress is playing with a small white dog on the grass ."
LENGTHS = ((1, 9), (10, 12), (13, 15), (16, 99))  # words of the source


def lines(language: str) -> list[str]:
    path = Path(os.environ["REGARD_DATA"], "multi30k", f"test_2016_flickr.{language}.gz")
    return gzip.open(path, "rt", encoding="utf-8").read().splitlines()


def train_all(out: Path, recipe: str, names: list[str], overrides: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "one", str(out), *overrides, "--recipe", recipe]
    running = []
    for name in names:
        with (out / f"{name}.log").open("w") as log:
            process = subprocess.Popen([*command, "--names", name], stderr=log)
        running.append((name, process))
    for name, process in running:
        print(name, "ended with", process.wait(), flush=True)
        print((out / f"{name}.log").read_text()[-1500:], flush=True)


def train_one(out: Path, recipe: str, name: str, overrides: list[str]) -> None:
    from regard import api
    from regard.training.events import Evaluated

    begin = time.perf_counter()
    study = api.open_study(recipe, *overrides, out=out / "runs")
    assert study is not None
    for event in study.events(name):
        if isinstance(event, Evaluated):
            seconds, loss = time.perf_counter() - begin, event.metrics["loss"]
            print(f"{seconds:5.0f} s  step {event.step}  loss {loss:.4f}", file=sys.stderr)
    trained = time.perf_counter() - begin
    run = api.load(study.folder / name)
    result = {
        "parameters": run.parameters,
        "seconds": trained,
        "hypotheses": run.translate(lines("en"), beam=5),
        "sentence": run.translate(SENTENCE),
    }
    if run.config.model.get("score") is not None:
        maps = run.explain(SENTENCE, words=True)
        ((_, attention),) = maps.items()
        result["rows"], result["columns"] = attention.rows, attention.columns
        result["weights"] = attention.mean().tolist()
    print(f"translated after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    (out / f"{name}.json").write_text(json.dumps(result, ensure_ascii=False))


def score(out: Path) -> None:
    import matplotlib.pyplot as plt

    from regard.tasks.metrics import bleu

    sources, references = lines("en"), [line.lower() for line in lines("fr")]
    names = [*NAMES, *sorted({path.stem for path in out.glob("*.json")} - {*NAMES})]
    names = [name for name in names if (out / f"{name}.json").exists()]
    aligned = {}
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    labels = [f"{low}-{high}" if high < 99 else f"{low}+" for low, high in LENGTHS]
    print(f"| | parameters | seconds | BLEU | {' | '.join(labels)} |")
    print(f"|---|---|---|---|{'---|' * len(labels)}")
    for name in names:
        result = json.loads((out / f"{name}.json").read_text())
        by_length = []
        for low, high in LENGTHS:
            chosen = [i for i, s in enumerate(sources) if low <= len(s.split()) <= high]
            by_length.append(
                bleu([result["hypotheses"][i] for i in chosen], [references[i] for i in chosen])[0]
            )
        total, _ = bleu(result["hypotheses"], references)
        cells = [f"{result['parameters'] / 1e6:.1f} M", f"{result['seconds']:.0f}"]
        cells += [f"{value:.1f}" for value in (total, *by_length)]
        print(f"| {name} | {' | '.join(cells)} |")
        axes.plot(labels, by_length, marker="o", label=name)
        if "weights" in result:
            aligned[name] = result
    axes.set(xlabel="words of the English sentence", ylabel="BLEU")
    axes.legend(frameon=False)
    figure.savefig(out / "bleu-by-length.svg")
    figure, maps = plt.subplots(1, len(aligned), figsize=(12, 4.5), layout="constrained")
    for part, (name, result) in zip(maps, aligned.items(), strict=True):
        part.imshow(result["weights"], vmin=0, cmap="Blues")
        part.set_xticks(range(len(result["columns"])), result["columns"], rotation=90)
        part.set_yticks(range(len(result["rows"])), result["rows"])
        part.set_title(name)
    figure.savefig(out / "alignments.svg")
    for name in names:
        print(f"{name}: {json.loads((out / f'{name}.json').read_text())['sentence']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("train", "one", "score"))
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--names", nargs="+", default=NAMES, help="the runs to train")
    parser.add_argument("--recipe", default="lab")
    options = parser.parse_args()
    if options.command == "train":
        train_all(options.out, options.recipe, options.names, options.overrides)
    elif options.command == "one":
        train_one(options.out, options.recipe, *options.names, options.overrides)
    else:
        score(options.out)
