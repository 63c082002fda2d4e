"""Vocabulary files of other makers, written by hand: small, and with all that real ones have."""

import struct

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number, value):
    """One field of a protocol buffer: a number, a float or some bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(fields):
    return b"".join(field(number, value) for number, value in fields.items())


def piece(text, score=0.0, kind=NORMAL):
    return message({1: text, 2: score, 3: kind})


def sentencepiece(pieces, *, model=1, fallback=False, charsmap=b"", prefix=True, squeeze=True):
    """A `.model` file of these (text, score, kind)."""
    normalizer = {1: "test", 3: int(prefix), 4: int(squeeze)} | ({2: charsmap} if charsmap else {})
    return b"".join(
        [
            *(field(1, piece(*each)) for each in pieces),
            field(2, message({3: model, 35: int(fallback)})),
            field(3, message(normalizer)),
        ]
    )


def charsmap(before, after):
    """A map of one ASCII character to a text: a double array of two steps, then the texts."""
    units = [0] * 512
    units[0] = 256 << 10  # the children of the root lie at 256 ^ character
    place = 256 ^ ord(before)
    units[place] = 1 << 10 | 1 << 8 | ord(before)  # has a leaf, at place ^ 1
    units[place ^ 1] = 1 << 31  # the text at offset 0
    return struct.pack("<I512I", 4 * 512, *units) + after.encode() + b"\0"


def bytes_pieces():
    return [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]


UNIGRAM = [
    ("<pad>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    ("<unk>", 0.0, UNKNOWN),
    ("▁", -2.0),
    ("▁the", -3.0),
    ("▁t", -4.5),
    ("he", -3.5),
    ("h", -5.0),
    ("e", -4.0),
    ("t", -4.2),
    ("▁ca", -4.0),
    ("c", -6.0),
    ("a", -4.1),
    ("at", -4.0),
    ("s", -5.5),
    ("▁cats", -9.0),
]
BPE = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *bytes_pieces(),
    *((text, -float(rank)) for rank, text in enumerate(["th", "▁th", "▁the", "at", "▁c", "▁cat"])),
    ("ca", -6.0),  # comes after "at"
    ("s>", -7.0),  # with "<", all of a control piece
    *((text, -float(rank)) for rank, text in enumerate("▁thecasn<>/", 8)),
]


def llama2c(pieces):
    """llama2.c's tokenizer.bin, with spaces as they are."""
    texts = [(text.replace("▁", " ").encode(), score) for text, score, *_ in pieces]
    texts[1:3] = [(b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    longest = max(len(text) for text, _ in texts)
    records = [struct.pack("<fi", score, len(text)) + text for text, score in texts]
    return struct.pack("<i", longest) + b"".join(records)
