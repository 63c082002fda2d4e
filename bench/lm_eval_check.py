"""A model trained here, exported, and judged by lm-eval from its folder: the same likelihoods?

    pip install "lm-eval[hf]"
    python bench/lm_eval_check.py TEXT [--documents 20] [--steps 200]

Trains a small LLaMA-shaped decoder on the first nine tenths of TEXT, exports it, and cuts
documents out of the rest. Each is a file for `regard evaluate` and a line of a local task for
lm-eval, which reads the exported folder through transformers; nothing is downloaded. Both give
log P(rest of the document | its first token), which must be equal.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import regard
from regard.api import Run

MODEL = [
    "model.preset=modern",
    "model.dim=128",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.context=128",
    'data.tokenizer={kind="bpe",size=1000}',
]
TASK = """\
task: regard_documents
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{first}}}}"
doc_to_target: "{{{{rest}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}]
"""


def documents(run: Run, text: str, count: int) -> list[list[int]]:
    """Stretches of at most a context that begin and end with a letter."""
    length = run.model.context
    found = []
    for paragraph in text.split("\n\n"):
        ids = run.tokenizer.encode(paragraph.strip())[:length]
        first = run.tokenizer.decode(ids[:1])
        if len(ids) > 20 and first.strip() == first and run.tokenizer.encode(first) == ids[:1]:
            found.append(ids)
    return found[:count]


def ours(run: Run, ids: list[int], folder: Path) -> float:
    """log P by `regard evaluate` of a file that holds the document."""
    path = folder / "document.txt"
    path.write_text(run.tokenizer.decode(ids), encoding="utf-8")
    metrics: dict[str, Any] = run.evaluate(str(path))
    return -float(metrics["loss"]) * (len(ids) - 1)


def theirs(run: Run, all_ids: list[list[int]], exported: Path, folder: Path) -> list[float]:
    """log P by lm-eval."""
    import lm_eval

    lines = [
        json.dumps(
            {"first": run.tokenizer.decode(ids[:1]), "rest": run.tokenizer.decode(ids[1:])},
            ensure_ascii=False,
        )
        for ids in all_ids
    ]
    (folder / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "task.yaml").write_text(TASK.format(file=folder / "documents.jsonl"))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "dtype": "float32", "device": "cpu"},
        tasks=["regard_documents"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["regard_documents"], key=lambda sample: sample["doc_id"])
    return [float(sample["resps"][0][0][0]) for sample in samples]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = regard.train(given.text, *MODEL, f"train.steps={given.steps}", out=folder / "run")
        exported = run.export(folder / "exported")
        print(f"exported as {exported.architecture}, logits off by {exported.difference:.1e}")
        text = Path(given.text).read_text(encoding="utf-8")
        all_ids = documents(run, text[9 * len(text) // 10 :], given.documents)
        here = [ours(run, ids, folder) for ids in all_ids]
        there = theirs(run, all_ids, exported.path, folder)
    tokens = sum(len(ids) - 1 for ids in all_ids)
    largest = max(abs(a - b) for a, b in zip(here, there, strict=True))
    print(f"{len(all_ids)} documents, {tokens} scored tokens")
    print(f"log-likelihood in all: regard {sum(here):.4f}, lm-eval {sum(there):.4f}")
    print(f"largest difference of one document: {largest:.1e}")


if __name__ == "__main__":
    main()
