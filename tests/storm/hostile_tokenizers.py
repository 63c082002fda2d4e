"""Hostile tokenizer.json files, by name: written by hand, and random changes of sound ones.

    hostile_tokenizers.py FOLDER COUNT SEED

tries COUNT of them, each in a process of its own, and prints what came of each as JSON.
"""

import copy
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from regard.errors import RegardError
from regard.text import Tokenizer, train_tokenizer

SECONDS, BYTES, HANG = 2.0, 500_000_000, 60
WORDS = ["the", "cat", "sat", "on", "the", "mat,", "'twas", "1,234.50", "dogs!", "Was", "it?"]
WORDS += ["(yes)", "\n"]
KINDS = ({"kind": "char"}, *({"kind": kind, "vocab_size": 300} for kind in ("bpe", "wordpiece")))
KINDS += ({"kind": "unigram", "vocab_size": 50}, {"kind": "word", "vocab_size": 60})


def prose(length, seed=0):
    """Text as anybody may have it."""
    chance = random.Random(seed)
    return " ".join(chance.choices(WORDS, k=length // 3))[:length]


def sound():
    """A tokenizer.json of every kind."""
    for kind in KINDS:
        tokenizer = train_tokenizer(kind, [prose(5000)])
        yield kind["kind"], json.loads(tokenizer.backend.to_str())


def replace(pattern, content, syntax="String"):
    return {"type": "Replace", "pattern": {syntax: pattern}, "content": content}


def sequence(key, steps):
    return {"type": "Sequence", key: steps}


def split(expression):
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def nested(step, key, depth):
    for _ in range(depth):
        step = sequence(key, [step])
    return step


def added(id, content, **changes):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": id, "content": content, **flags, **changes}


EXPRESSIONS = [
    r"(a+)+$",
    r"(\w+\s?)+$",
    r"(\w|\w\w)+[!?]\z",
    r"(?:a|a)*[bc]|[\s\S]",
    r"([\s\S]*)([\s\S]*)\1\2[!?]{2}",
    r"[\s\S]*[\s\S]*[st](?=[!?]\z)",
    r"[\s\S]*[\s\S]*[\s\S]*(?=[st][!?]\z)",
    r"[\s\S]*[st](?=[!?]\z)",
    r"(?:[\s\S]?){99}[!?](?=\z)",
    r"(\w?){50}\w{50}",
    r"(?=([\s\S]+)+[!?]\z)",
    r"((a{0,99}){0,99}){0,99}",
    r"\g<0>",
    r"(?<x>\w\g<x>?)",
    r"(?~\w+)",
    r"(?(1)a|b)",
    "(" * 3000 + ")" * 3000,
    "[" * 3000,
    r"(?<=\w{1,9999})a",
    r"\w{1,99999}{1,99999}",
    r"x{100000}{100000}",
    "|".join("abc" * 3000),
    r"",
    r"\p{Nonsense}",
    r"(?<!(a+)+)b",
]
STEPS = {  # changes of one part
    "normalizer": [
        sequence("normalizers", [replace("a", "a" * 30)] * 8),
        sequence("normalizers", [replace(" ", "  ")] * 30),
        sequence("normalizers", [replace(".", "xx", "Regex")] * 30),
        replace("", "x"),
        replace("e", "x" * 5_000_000),
        sequence("normalizers", [replace("$", "x" * 60, "Regex")] * 9),
        sequence("normalizers", [{"type": "Prepend", "prepend": "x" * 1_000_000}] * 3),
        sequence("normalizers", [{"type": "Prepend", "prepend": "x" * 60}] * 9),
        sequence("normalizers", [replace("l", "\ufdfa"), {"type": "NFKC"}] * 12),
        sequence("normalizers", [{"type": "ByteLevel"}] * 40),
        sequence("normalizers", [{"type": "NFKD"}] * 1000),
        nested({"type": "NFC"}, "normalizers", 50),
        nested({"type": "NFC"}, "normalizers", 300),
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Strip"},
        {"type": "Unknown"},
        [],
        *(replace(expression, "x", "Regex") for expression in EXPRESSIONS),
    ],
    "pre_tokenizer": [
        sequence("pretokenizers", [{"type": "ByteLevel", "add_prefix_space": True}] * 40),
        sequence(
            "pretokenizers",
            [{"type": "Metaspace", "replacement": c, "prepend_scheme": "always"} for c in "▁_-"]
            * 9,
        ),
        nested({"type": "Whitespace"}, "pretokenizers", 50),
        {"type": "FixedLength", "length": 0},
        {"type": "FixedLength", "length": 2**63},
        {"type": "CharDelimiterSplit", "delimiter": ""},
        sequence("pretokenizers", [{"type": "Whitespace"}] * 10_000),
        *map(split, EXPRESSIONS),
    ],
    "decoder": [
        replace("", "xx"),
        sequence("decoders", [replace("", "x" * 9)] * 9),
        sequence("decoders", [replace("a", "a" * 60)] * 9),
        sequence("decoders", [{"type": "Fuse"}, replace(".", "xx", "Regex")] * 30),
        sequence("decoders", [{"type": "BPEDecoder", "suffix": ""}] * 40),
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "x" * 5_000_000, "cleanup": True},
        {"type": "Strip", "content": " ", "start": 2**63, "stop": 2**63},
        nested({"type": "Fuse"}, "decoders", 50),
        *(
            sequence("decoders", [{"type": "Fuse"}, replace(expression, "x", "Regex")])
            for expression in EXPRESSIONS
        ),
    ],
    "added_tokens": [
        [added(2**31, "x")],
        [added(-1, "x")],
        [added(10**30, "x")],
        [added(5, "")],
        [added(i, "x" * 1000 + str(i)) for i in range(20_000)],
        [added(i, f"{i}") for i in range(150_000)],
        [added(i, "ab"[i % 2] * i, normalized=True) for i in range(3000)],
        [added(7, "e", special=True)],
        "none",
    ],
    "post_processor": [
        {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", 2**31]},
        {"type": "RobertaProcessing", "sep": ["x", -1], "cls": ["y", 0]},
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
            "pair": [],
            "special_tokens": {},
        },
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [0] * 1_000_000, "tokens": ["x"]}},
        },
    ],
    "padding": [
        {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    ],
    "truncation": [
        {"max_length": 1, "strategy": "LongestFirst", "stride": 5, "direction": "Right"},
    ],
}
MODELS = [  # changes of the model
    {"continuing_subword_prefix": "x" * 5_000_000},
    {"end_of_word_suffix": "x" * 5_000_000},
    {"max_input_chars_per_word": 10**12},
    {"unk_token": "none"},
    {"unk_id": 10**9},
    {"unk_id": -1},
    {"dropout": 0.5},
    {"dropout": 5.0},
    {"merges": [["t", "h"]] * 500_000},
    {"merges": ["th " * 100_000]},
    {"vocab": {}},
    {"vocab": []},
    {"vocab": {"x" * 20_000_000: 0}},
    {"vocab": {"<unk>": 0, "a": 2**40}},
    {"vocab": [["a", float("-inf")], ["b", float("inf")]], "unk_id": 0},
    {"vocab": [[f"{i:0600x}", -1.0] for i in range(20_000)], "unk_id": 0},
    {"vocab": [["", 0.0], ["a", 0.0]], "unk_id": 0},
    {"vocab": {f"{i}": i for i in range(900_000)}},
    {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    {"type": "Unigram", "vocab": [["<unk>", 0.0], ["e", -1e308]], "unk_id": 0},
    {"byte_fallback": True},
    {"ignore_merges": True},
]
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1e308,
    "",
    "x",
    "\0",
    "\ud7ff",
    "(",
    "a" * 9999,
]
VALUES += [[], {}, [[]], "Sequence", "Regex", "\U0010fffd", "e", " "]


def attacks(files):
    """All that are written by hand, for the first kind of tokenizer that they can change."""
    for part, changes in STEPS.items():
        for number, change in enumerate(changes):
            for kind in ("bpe", "unigram") if part in ("normalizer", "decoder") else ("bpe",):
                table = {**files[kind], part: change}
                if part == "added_tokens" and isinstance(change, list):
                    table[part] = files[kind][part] + change
                yield f"{kind} {part} {number}", json.dumps(table)
    for number, change in enumerate(MODELS):
        for kind, table in files.items():
            if change.keys() <= table["model"].keys() | {"type", "dropout"}:
                model = {**table["model"], **change}
                yield f"{kind} model {number}", json.dumps({**table, "model": model})
    for kind, table in files.items():
        text = json.dumps(table)
        twice = f'{{"normalizer": {json.dumps(STEPS["normalizer"][0])}, {text[1:]}'
        yield f"{kind} a key twice", twice
        yield f"{kind} deep", "[" * 100_000
        yield f"{kind} bomb", text[:-1] + ', "x": [' + "[]," * 3_000_000 + "[]]}"


def places(value, path=()):
    """The path of every value in a table, but of few words."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children)[:12]:
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))
        else:
            yield (*path, key)


def changed(table, chance):
    """A copy with one to three random changes."""
    table = copy.deepcopy(table)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice([path for path in places(table) if path])
        parent = table
        for key in path:
            parent = parent[key]
        change = chance.random()
        if change < 0.15:
            del parent[last]
        elif change < 0.25 and isinstance(parent, list):
            parent[last:last] = [parent[last]] * chance.choice([1, 9, 2000])
        elif change < 0.5 and isinstance(parent, dict):
            part = chance.choice([*STEPS])
            parent[last] = copy.deepcopy(chance.choice(STEPS[part]))
        else:
            parent[last] = copy.deepcopy(chance.choice(VALUES))
    return table


def mutations(seed):
    """Every attack, then random changes without an end."""
    files = dict(sound())
    yield from attacks(files)
    chance = random.Random(seed)
    number = 0
    while True:
        kind = chance.choice([*files])
        number += 1
        yield f"{kind} random {number}", json.dumps(changed(files[kind], chance))


def use(path):
    """Load, encode and decode as a command would; the outcome."""
    try:
        tokenizer = Tokenizer.load(path)
    except RegardError as error:
        return f"refused: {error}"
    try:
        for text in ("the cat", prose(20_000) + "!"):
            ids = tokenizer.encode(text)
            assert all(0 <= id < tokenizer.vocab_size for id in ids)
            assert ids == tokenizer.encode(text)
            tokenizer.decode(ids)
            tokenizer.with_special_tokens(ids)
            tokenizer.unknown_parts(text[:100])
        tokenizer.fingerprint()
        tokenizer.encode_batch([prose(3000, seed) for seed in range(8)])
    except RegardError as error:
        return f"refused at use: {error}"
    return "used"


def attempt(path):
    """What a process of its own makes of a file: outcome, seconds of the processor, bytes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics are told there too
        signal.alarm(HANG)
        before, began = memory(), time.process_time()
        try:
            outcome = use(path)
        except BaseException:
            outcome = f"failed: {traceback.format_exc()}"
        taken = time.process_time() - began
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(write, json.dumps([outcome[-2000:], taken, max(0, peak - before)]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        report = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(report) if report else [f"died: {status}", float(HANG), 0]


def least(path):
    """The attempt of three with the least time, if the first takes too long.

    Other programs on the cores make a process slower, by its own processor time too.
    """
    attempts = [attempt(path)]
    while attempts[-1][1] >= SECONDS and len(attempts) < 3:
        attempts.append(attempt(path))
    return min(attempts, key=lambda each: each[1])


def memory():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(folder, count, seed):
    """Try the first `count`."""
    path = Path(folder, "tokenizer.json")
    results = []
    for (name, text), _ in zip(mutations(int(seed)), range(int(count)), strict=False):
        path.write_text(text)
        results.append([name, *least(path)])
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
