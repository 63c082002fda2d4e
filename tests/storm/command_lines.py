"""Random command lines: every command, its own options, sound and senseless values.

    command_lines.py FOLDER COUNT SEED

runs COUNT of them in this process, in FOLDER (`prepare` fills it), and prints those that end in a
traceback or take too long as JSON.
"""

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import typer

from cli.conftest import PAIR_WORDS, TEXT_WORDS
from regard.cli import app, main
from training.runs import write_data

SECONDS = 300  # for one command; a run of two steps takes one
ADDRESS_SPACE = 3 << 30  # bytes beyond torch's: what asks for more must be refused, not swapped
CODES = {0, 1, 2, 3, 4, 5}
SMALL = ["model.dim=8", "model.layers=1", "model.heads=2", "train.batch=2", "train.steps=2"]
PLACES = ["runs/text", "runs/pairs", "runs/labels", "cats.txt", "pairs.tsv", "labels.tsv", "x.csv"]
PLACES += ["nowhere", ".", "/", "/dev/null", "gpt2", "llama", "quickstart", "empty.txt", "x.npz"]
PLACES += [
    "runs/talk",
    "runs/lora",
    "runs",
    "runs/text/model.safetensors",
    "recipe.toml",
    "ngram",
    "seq2seq",
    "hf://x/y",
]
NUMBERS = ["0", "1", "2", "-1", "3.5", "nan", "inf", "-inf", "1e308", "1e-320", "٣", "1_0", "0x10"]
NUMBERS += ["99999999999999999999", "-0", "+1", "1e3", "½", " 1", "1 ", "007", "true", "None"]
TEXTS = [
    "",
    " ",
    "the cat",
    "x" * 3000,
    "\0",
    "\udcff",
    "🦊",
    "-",
    "--",
    "=",
    "a=b",
    "'",
    '"',
    "\\",
]
TEXTS += ["{}", "[]", "{", "[1", "null", "%s", "$(x)", "../..", "a\nb", "\x1b[31m", "*", "~", ","]
SETTINGS = ["model.dim", "model.layers", "model.heads", "model.context", "model.position", "model"]
SETTINGS += ["model.norm", "model.dropout", "model.ffn", "model.vocab_size", "train.batch", "seed"]
SETTINGS += [
    "train.lr",
    "train.optimizer",
    "train.schedule",
    "train.warmup",
    "train.max_grad_norm",
    "train",
]
SETTINGS += ["train.ema", "train.save_every", "train.evaluate_every", "train.precision", "device"]
SETTINGS += [
    "data.path",
    "data.tokenizer",
    "data.tokenizer.vocab_size",
    "data.validation",
    "data.kind",
]
SETTINGS += [
    "task",
    "task.kind",
    "train.accumulate",
    "train.compile",
    "train.keep_checkpoints",
    "data",
    "start",
]
SETTINGS += ["", ".", "a.b.c", "model.nonsense", "train.baseline", "data.columns", "data.lower"]
SAMPLERS = ["top_k", "top_p", "temperature", "min_p", "typical", "greedy", "nonsense", "mirostat"]
CHOICES = ["rotary", "alibi", "rms", "layer", "swiglu", "adamw", "muon", "char", "bpe", "word"]
CHOICES += [
    "float16",
    "float8",
    "bfloat16",
    "cpu",
    "cuda",
    "cosine",
    "causal",
    "image_classification",
    "tag",
    "false",
]


METAVARS = ("N", "T", "GB", "GB/S", "TFLOPS", "FRACTION", "POWER")  # of numbers
SLOW = ("train", "quickstart", "export", "import", "evaluate")
SOUND = {  # places and texts that a command understands
    "train": [["cats.txt"], ["pairs.tsv"], ["labels.tsv"], ["recipe.toml"]],
    "quickstart": [["data.path.max_number=99"]],
    "resume": [["runs/text"], ["runs/pairs"], ["runs/labels"]],
    "evaluate": [["runs/text"], ["runs/pairs"], ["runs/labels"], ["runs/text", "cats.txt"]],
    "generate": [["runs/text", "the cat"], ["runs/text"]],
    "translate": [["runs/pairs", "one two"]],
    "predict": [["runs/labels", "good cat"], ["runs/labels", "labels.tsv"]],
    "neighbours": [["runs/text", "the"], ["runs/pairs", "one"]],
    "explain": [["runs/text", "the cat"], ["runs/pairs", "one two"], ["runs/labels", "good"]],
    "chat": [["runs/talk"]],
    "show": [
        ["score-variance"],
        ["next-token", "runs/text", "the cat"],
        ["bpe-merges", "cats.txt"],
    ],
    "merge": [["runs/lora", "merged"], ["runs/text", "merged", "--adapter", "runs/lora"]],
    "import": [["exported"]],
    "export": [["runs/text", "new"], ["runs/gpt", "new2"]],
    "info": [["gpt2"], ["runs/text"], ["recipe.toml"]],
    "diff": [["gpt2", "llama"], ["runs/text", "gpt2"]],
    "compare": [["runs/text", "runs/pairs"], ["runs/text"]],
    "plan": [["gpt2"], ["llama"]],
    "settings": [["lr"], []],
}


def prepare(folder):
    """Data of several kinds, and a small run of three."""
    folder = Path(folder)
    write_data(folder)
    os.chdir(folder)
    labels = [f"{text}\t{label}" for text, label in (("good cat", "yes"), ("bad dog", "no"))]
    Path("labels.tsv").write_text("\n".join(["text\tlabel", *labels * 30]))
    Path("x.csv").write_text("a,b\n1,2\n3\n")
    Path("empty.txt").write_text("")
    Path("x.npz").write_bytes(b"PK\3\4junk")
    Path("recipe.toml").write_text('[data]\npath = "cats.txt"\n')
    for name, data, words in (
        ("text", "cats.txt", TEXT_WORDS),
        ("pairs", "pairs.tsv", PAIR_WORDS),
        ("labels", "labels.tsv", ["train.steps=2", "train.batch=2"]),
    ):
        code, said = call(["train", data, *words, "--out", f"runs/{name}", "--quiet"])
        assert code == 0, said
    code, said = call(
        ["train", "cats.txt", "model.preset=gpt2", *SMALL, "--out", "runs/gpt", "--quiet"]
    )
    assert code == 0, said
    talks = (
        [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "ho"}]
        for n in range(20)
    )
    Path("talk.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    lora = ["train.start=runs/gpt", "train.tune.kind=lora", "train.tune.rank=2"]
    for name, words in (
        ("talk", ["talk.jsonl", *SMALL, "data.tokenizer=char"]),
        ("lora", ["cats.txt", "train.steps=2", "train.batch=2", *lora]),
    ):
        code, said = call(["train", *words, "--out", f"runs/{name}", "--quiet"])
        assert code == 0, said
    code, said = call(["export", "runs/gpt", "exported"])
    assert code == 0, said


def call(words):
    """Run a command line here: its exit code, or None for a traceback; and what it said."""
    streams = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    with contextlib.redirect_stdout(streams), contextlib.redirect_stderr(streams):
        try:
            main(words)
            code = "it returned"
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException:
            traceback.print_exc()
            code = None
        streams.flush()
        said = streams.buffer.getvalue().decode(errors="replace")
    return code, said


def commands():
    """The options of every command, and the names of their values; None for a flag."""
    for name, command in typer.main.get_command(app).commands.items():
        if name in ("serve", "studio"):
            continue  # where they work, they do not end
        options = [
            (flag, None if getattr(parameter, "is_flag", False) else parameter.metavar)
            for parameter in command.params
            for flag in parameter.opts
            if flag.startswith("-")
        ]
        yield name, options


def value(chance, kind=None):
    """Any value; of a number mostly one."""
    pools = [NUMBERS] if kind in METAVARS and chance.random() < 0.8 else []
    return chance.choice(chance.choice(pools or [NUMBERS, TEXTS, PLACES, CHOICES]))


def setting(chance):
    name = chance.choice(SETTINGS)
    found = value(chance)
    if name in ("train.accumulate", "train.save_every", "train.evaluate_every", "train.batch"):
        found = chance.choice(["0", "-1", "3.5", "nan", "x", "", "2"])  # no more than two steps
    return f"{name}={found}"


def sampler(chance):
    name = chance.choice(SAMPLERS)
    return chance.choice([name, f"{name}={value(chance)}", f"{name} {value(chance)}"])


def command_line(chance, table):
    """A command, places and texts, options, settings; then at times a change of the words."""
    name = chance.choice([*table])
    if name in SLOW and chance.random() < 0.7:
        name = chance.choice([*table])
    if name in SOUND and chance.random() < 0.7:
        words = [name, *chance.choice(SOUND[name])]
    else:
        words = [name, *(chance.choice(PLACES) for _ in range(chance.choice([0, 1, 1, 1, 2])))]
        words += [chance.choice(TEXTS) for _ in range(chance.choice([0, 0, 1, 2]))]
    if name == "train" and chance.random() < 0.6:
        words.append("--dry-run")
    if name in ("train", "resume", "quickstart"):
        words += SMALL if "cats.txt" in words else ["train.steps=2"]
    for _ in range(chance.choice([0, 1, 1, 2])):
        flag, kind = chance.choice(table[name])
        words.append(flag)
        if kind is not None and chance.random() < 0.95:
            is_sampler = flag in ("-s", "--sampler")
            words.append(sampler(chance) if is_sampler else value(chance, kind))
    for _ in range(chance.choice([0, 0, 0, 0, 1, 2])):
        words.append(setting(chance))
    if chance.random() < 0.1:
        at = chance.randrange(len(words))
        words[at:at] = [chance.choice([*TEXTS, "--help", "--json", "--debug", "--x", "-"])]
    if chance.random() < 0.05:
        chance.shuffle(words)
    return words


class TooLong(BaseException):
    """A command that does not end."""


def alarm(*_):
    raise TooLong


def attack(folder, count, seed):
    """Run `count` command lines; those that failed, and how often each exit code came."""
    os.chdir(folder)
    import torch  # noqa: F401  # the libraries of a CUDA build alone fill that space

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = ADDRESS_SPACE + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, alarm)
    chance = random.Random(seed)
    table = dict(commands())
    failures, codes, slowest = [], {}, (0.0, [])
    for _ in range(count):
        words = command_line(chance, table)
        signal.alarm(SECONDS)
        began = time.monotonic()
        code, said = call(words)
        signal.alarm(0)
        slowest = max(slowest, (time.monotonic() - began, words))
        codes[str(code)] = codes.get(str(code), 0) + 1
        debug = "--debug" in words
        limit = 1_000_000 if code == 0 else 100_000  # `settings --json` has 100,000
        if code not in CODES or ("Traceback" in said and not debug) or len(said) > limit:
            failures.append([words, code, said[-3000:]])
    return {"failures": failures, "codes": codes, "slowest": slowest}


if __name__ == "__main__":
    if sys.argv[2:]:
        print(json.dumps(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        prepare(sys.argv[1])
