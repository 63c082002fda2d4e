"""Files of data with random damage: read, or refused with an error of ours."""

import gzip
import io
import json
import random
import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from regard.errors import RegardError
from regard.pipelines.detect import open_data

INSERTED = [
    b"\0",
    b"\xff" * 4,
    b'"',
    b"\n",
    b",",
    b"\t",
    b"[[[[",
    b"1e999",
    b"NaN",
    b"\xef\xbb\xbf",
]
INSERTED += [b"-1", b"\xe2\x80\xa8", b"\r", b"x" * 70_000, struct.pack(">I", 2**31 - 1)]


def samples():
    """A sound file of every format, by its path."""
    numbers = np.random.default_rng(0)
    buffer = io.BytesIO()
    np.savez(buffer, x=numbers.random((6, 5, 5)), y=np.arange(6) % 2)
    yield "plain.npz", buffer.getvalue()
    buffer = io.BytesIO()
    images = numbers.integers(0, 255, (6, 5, 5), np.uint8)
    np.savez_compressed(buffer, images=images, labels=np.array([*"ababab"]))
    yield "packed.npz", buffer.getvalue()
    yield "t.csv", b"text,label\n" + b'"the cat, sat",yes\na dog,no\n' * 10
    yield "s.csv", b"day,value\n" + b"".join(b"%d,%f\n" % (n, n / 2) for n in range(60))
    rows = [{"text": f"a b {n}", "label": n % 2, "more": {"x": [n]}} for n in range(20)]
    yield "t.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    pairs = [{"source": f"one {n}", "target": f"un {n}"} for n in range(20)]
    yield "p.json", json.dumps(pairs).encode()
    yield "p.tsv", b"".join(b"one %d\tun %d\n" % (n, n) for n in range(20))
    yield "t.conll", b"1\tword\tB-X\n2\tthe\tO\n\n" * 20
    yield "t.txt", "the cät sat\n".encode() * 20
    yield "z.txt.gz", gzip.compress(b"the cat sat\n" * 20)
    yield "idx/train-images-idx3-ubyte", struct.pack(">4I", 0x803, 6, 5, 5) + bytes(range(150))
    yield "idx/train-labels-idx1-ubyte", struct.pack(">2I", 0x801, 6) + bytes([0, 1] * 3)
    strokes = {"train_xyp": np.ones((12, 3), np.float32), "train_off": np.arange(0, 13, 2)}
    buffer = io.BytesIO()
    np.savez(buffer, **strokes, train_label=np.array([*"ababab"]))
    yield "strokes.npz", buffer.getvalue()
    article = {"context": "the cat sat on the mat", "qas": []}
    for n, text in enumerate(["cat", "mat", "the"] * 3):
        answers = [{"text": text, "answer_start": article["context"].index(text)}]
        article["qas"].append({"id": str(n), "question": f"what {n}?", "answers": answers})
    other = {"context": "a dog", "qas": [{"question": "who?", "is_impossible": True}]}
    squad = {"version": "2", "data": [{"paragraphs": [article, other]}]}
    yield "squad.json", json.dumps(squad).encode()
    talks = (
        [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "ho"}]
        for n in range(9)
    )
    yield "talk.jsonl", b"".join(json.dumps({"messages": t}).encode() + b"\n" for t in talks)
    days = (f"2024-{1 + n // 28:02}-{1 + n % 28:02}T00:00,{n}.5" for n in range(60))
    yield "dates.csv", "\n".join(["date,value", *days]).encode()
    parts = (f"{1 + n % 28};{1 + n // 28};2024;{n},5" for n in range(60))
    yield "parts.csv", "\n".join(["day;month;year;value", *parts]).encode()
    captions = "image,caption\nx.png,a cat\ny.png,a dog\nx.png,two cats\n"
    yield "captions/captions.csv", captions.encode()
    image = pytest.importorskip("PIL.Image")
    for name in ("x.png", "y.png"):
        buffer = io.BytesIO()
        image.fromarray(numbers.integers(0, 255, (9, 12, 3), np.uint8)).save(buffer, "PNG")
        yield f"captions/{name}", buffer.getvalue()
    for name, mode in {"a/x.png": "RGB", "a/p.png": "P", "b/l.png": "LA", "b/y.jpg": "L"}.items():
        buffer = io.BytesIO()
        pixels = numbers.integers(0, 255, (9, 12, 3), np.uint8)
        format = "JPEG" if name.endswith("jpg") else "PNG"
        image.fromarray(pixels).convert(mode).save(buffer, format)
        yield f"img/{name}", buffer.getvalue()
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [*"abcd" * 9], "label": [*"xy" * 18]}), buffer)
    yield "t.parquet", buffer.getvalue()


def corrupted(content, chance):
    """A copy with one to five random changes."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(1 + min(len(content), chance.choice([60, 10**9])))
        length = chance.choice([1, 4, 50])
        change = chance.randrange(6)
        if change == 0:
            content[at : at + 1] = bytes([chance.randrange(256)])
        elif change == 1:
            del content[at : at + length]
        elif change == 2:
            content[at:at] = chance.choice(INSERTED)
        elif change == 3:
            del content[at:]
        elif change == 4:
            content[at:at] = content[at : at + length] * 3
        else:
            content[at : at + 4] = chance.choice([b"\xff" * 4, bytes(4), struct.pack("<I", 2**31)])
    return bytes(content)


def use(path):
    """Open the data and read all of it."""
    data = open_data(str(path))
    data.fingerprint()
    if data.kind == "captions":
        data.read(np.arange(len(data)), 5)
    elif data.kind == "images":
        data.read(np.arange(len(data)), 5)
        data.statistics(5)
    elif data.kind == "text":
        list(data.chunks(1000))
    data.split(0.4, 1)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, of odd but readable images
def test_corrupted_data_is_read_or_refused(count, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    files = dict(samples())
    chance = random.Random(1)
    outcomes = Counter()
    for number in range(count):
        name = chance.choice([*files])
        folder = Path(tmp_path, str(number % 9))
        shutil.rmtree(folder, ignore_errors=True)
        top = name.partition("/")[0]
        for other in files if "/" in name else [name]:
            if other.partition("/")[0] == top:
                (folder / other).parent.mkdir(parents=True, exist_ok=True)
                (folder / other).write_bytes(files[other])
        (folder / name).write_bytes(corrupted(files[name], chance))
        try:
            use(folder / top)
            outcomes["read"] += 1
        except RegardError:
            outcomes["refused"] += 1
    print(f"corrupted files of data: {dict(outcomes)}")
    assert len(outcomes) == 2
