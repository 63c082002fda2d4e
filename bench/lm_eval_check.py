"""Compare the log-likelihoods of `regard evaluate` with those of lm-eval for an exported model.

    pip install "lm-eval[hf]"
    python bench/lm_eval_check.py TEXT [--documents 20] [--steps 200]

Trains a small LLaMA-like decoder on the first nine tenths of TEXT, exports it, and takes documents
from the last tenth. Each is a file for `regard evaluate` and a line of a local task for lm-eval,
which reads the exported folder through transformers; nothing is downloaded. Both compute
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
    'data.tokenizer={kind="bpe",vocab_size=1000}',
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
    """The first tokens of paragraphs, at most `context`, whose text encodes to the same ids."""
    length = run.model.context
    selected = []
    for paragraph in text.split("\n\n"):
        ids = run.tokenizer.encode(paragraph.strip())[:length]
        first = run.tokenizer.decode(ids[:1])
        if len(ids) > 20 and first.strip() == first and run.tokenizer.encode(first) == ids[:1]:
            selected.append(ids)
    return selected[:count]


def regard_log_likelihood(run: Run, ids: list[int], folder: Path) -> float:
    """log P of a document by `regard evaluate`."""
    path = folder / "document.txt"
    path.write_text(run.tokenizer.decode(ids), encoding="utf-8")
    metrics: dict[str, Any] = run.evaluate(str(path))
    return -float(metrics["loss"]) * (len(ids) - 1)


def lm_eval_log_likelihoods(
    run: Run, all_ids: list[list[int]], exported: Path, folder: Path
) -> list[float]:
    """log P of each document by lm-eval."""
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = regard.train(options.text, *MODEL, f"train.steps={options.steps}", out=folder / "run")
        exported = run.export(folder / "exported")
        print(
            f"exported as {exported.architecture}, max logit difference {exported.difference:.1e}"
        )
        text = Path(options.text).read_text(encoding="utf-8")
        all_ids = documents(run, text[9 * len(text) // 10 :], options.documents)
        ours = [regard_log_likelihood(run, ids, folder) for ids in all_ids]
        theirs = lm_eval_log_likelihoods(run, all_ids, exported.path, folder)
    tokens = sum(len(ids) - 1 for ids in all_ids)
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(all_ids)} documents, {tokens} scored tokens")
    print(f"total log-likelihood: regard {sum(ours):.4f}, lm-eval {sum(theirs):.4f}")
    print(f"largest difference for one document: {largest:.1e}")


if __name__ == "__main__":
    main()
