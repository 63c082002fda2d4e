"""Draw the figures of docs/figures.md, and write the page below its introduction.

First runs the Python block of the introduction, which generates sentences, and trains the runs of
its commands that do not exist yet. Run it in the root of the repository.

python tools/figures.py [NAME…]    draw all figures, or only these
"""

import io
import re
import shlex
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

import regard
from regard.explain.figures import FIGURES, FigureEntry
from regard.explain.render.figure import encode, style

ROOT = Path(__file__).parents[1]
FILES = ROOT / "docs" / "images" / "figures"
PAGE = ROOT / "docs" / "figures.md"  # its introduction is written by hand
MAX_BYTES = 60_000  # of an image file
DPI = (120, 100, 90, 80, 70, 60)  # resolutions of a PNG; the first that is small enough is used

RUNS = ("decoder", "lstm", "vectors", "pronouns")
DECODER, LSTM, VECTORS, PRONOUNS = (f"runs/figures/{name}" for name in RUNS)
SENTENCE = "The model reads the text and predicts the next token"
CORPUS = "docs/classical.md"
COMMANDS: dict[str, tuple[str, ...]] = {  # the arguments of each figure's command
    "bag-of-words": (),
    "bpe-merges": (CORPUS,),
    "token-boundaries": ("Unhappily, tokenizers misbehave", CORPUS),
    "rare-words": (CORPUS,),
    "word-vectors": (VECTORS,),
    "next-token": (DECODER, SENTENCE),
    "shannon": (CORPUS,),
    "receptive-field": (),
    "gates": (LSTM, SENTENCE, "units=8"),
    "gradient-flow": ("elman", "gru", "lstm", "tiny-decoder", f"{SENTENCE} of {SENTENCE.lower()}"),
    "score-variance": (),
    "permutation": (),
    "shuffled-words": (DECODER, SENTENCE),
    "positions": ("length=16", "dim=16"),
    "path-lengths": (),
    "cost": (),
    "parameter-count": (),
    "loss-landscape": (CORPUS,),
    "beam-tree": (DECODER, "The model"),
    "temperature": (),
    "samplers": ("temperature=1.5", "top_k=8", "top_p=0.9"),
    "pronoun": (PRONOUNS, "layer=0"),
}


def main(names: list[str]) -> None:
    """Train the runs, draw the figures and write the page."""
    assert COMMANDS.keys() == FIGURES.keys(), "every figure has a command here"
    FILES.mkdir(parents=True, exist_ok=True)
    introduction = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)[0]
    (sentences,) = re.findall(r"```python\n((?:(?!```).)*pronouns.*?)```", introduction, re.S)
    exec(sentences, {})
    for arguments, run in re.findall(r"^\$ regard train (.*) --out (\S+)$", introduction, re.M):
        if not (ROOT / run).exists():
            regard.train(*arguments.split(), out=ROOT / run, quiet=True)
    files = {}
    for name in FIGURES:
        if names and name not in names:
            files[name] = next(FILES.glob(f"{name}.*"))
            continue
        files[name] = draw(name)
        print(files[name].relative_to(ROOT), files[name].stat().st_size)
    sections = (section(name, entry, files[name]) for name, entry in FIGURES.items())
    PAGE.write_text("\n".join([introduction.rstrip() + "\n", *sections]), encoding="utf-8")


def draw(name: str) -> Path:
    """Draw a figure and return its file: SVG if it is small, else PNG."""
    arguments = COMMANDS[name]
    inputs = [argument for argument in arguments if "=" not in argument]
    options: dict[str, object]
    if name == "samplers":
        options = {"samplers": arguments}
    else:
        pairs = (argument.split("=") for argument in arguments if "=" in argument)
        options = {key: int(value) for key, value in pairs}
    figure = regard.show(name, *inputs, **options).figure()
    for old in FILES.glob(f"{name}.*"):
        old.unlink()
    content, path = encode(figure, ".svg"), FILES / f"{name}.svg"
    if len(content) > MAX_BYTES:
        path = path.with_suffix(".png")
        for dpi in DPI:
            content = small_png(figure, dpi)
            if len(content) <= MAX_BYTES:
                break
    path.write_bytes(content)
    return path


def small_png(figure: Figure, dpi: int) -> bytes:
    """A PNG of 128 colours."""
    drawn, out = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    Image.open(drawn).convert("RGB").quantize(128).save(out, "PNG", optimize=True)
    return out.getvalue()


def section(name: str, entry: FigureEntry, file: Path) -> str:
    """The section of a figure: its summary, inputs, options, command and image."""
    command = shlex.join(["regard", "show", name, *COMMANDS[name]])
    options = ", ".join(f"`{key}={format_default(value)}`" for key, value in entry.options.items())
    takes = f"`{entry.usage}`" if entry.usage else "nothing"
    return f"""## {name}

{entry.summary} [{", ".join(entry.topics)}]

Takes {takes}. {f"Options: {options}." if options else "No options."}

```console
$ {command}
```

![{entry.summary}](images/figures/{file.name})
"""


def format_default(value: object) -> str:
    """A default value as it is written in a command."""
    if isinstance(value, tuple):
        items = (f'"{item}"' if isinstance(item, str) else f"{item:g}" for item in value)
        return f"[{', '.join(items)}]"
    return "none" if value is None else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])
