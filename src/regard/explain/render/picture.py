"""A picture as a list of shapes, written as SVG or as PNG: the same picture either way."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.sax.saxutils import escape

from regard.errors import ConfigError

INK, PAPER = "#222222", "#ffffff"
FINER = 2  # pixels of a PNG for one of ours, so that it is sharp on any screen
SMOOTH = 3  # and drawn so many times larger before it is shrunk: soft edges

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str = INK
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle, which tells something where a mouse rests on it."""

    x: float
    y: float
    radius: float
    colour: str = INK
    tells: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Text whose baseline begins, ends or has its middle at a point; `upwards` reads upwards."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    size: int = 12
    colour: str = INK
    bold: bool = False
    upwards: bool = False


Shape = Line | Dot | Words


@dataclass(slots=True)
class Picture:
    """Shapes on white paper, in pixels from the top left, the first at the back."""

    title: str
    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)


def document(title: str, width: int, height: int, parts: Iterable[str], font: str) -> str:
    """One self-contained SVG: no script, no font, nothing to fetch."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{font}" '
            'font-size="12" fill="#222">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>",
        ]
    )


def to_svg(picture: Picture) -> str:
    """The picture as an SVG."""
    parts = map(_element, picture.shapes)
    return document(picture.title, picture.width, picture.height, parts, "sans-serif")


def _element(shape: Shape) -> str:
    match shape:
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            dashes = ' stroke-dasharray="6 4"' if shape.dashed else ""
            return (
                f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
                f'stroke-width="{shape.width:g}" stroke-linejoin="round"{dashes}/>'
            )
        case Dot():
            told = f"<title>{escape(shape.tells)}</title>" if shape.tells else ""
            return (
                f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" '
                f'fill="{shape.colour}">{told}</circle>'
            )
        case Words():
            x, y = f"{shape.x:.1f}", f"{shape.y:.1f}"
            place = f'x="{x}" y="{y}"'
            if shape.upwards:
                place = f'transform="translate({x} {y}) rotate(-90)"'
            weight = ' font-weight="bold"' if shape.bold else ""
            return (
                f'<text {place} text-anchor="{shape.anchor}" font-size="{shape.size}" '
                f'fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'
            )


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG, by Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError:
        raise ConfigError(
            "a .png needs Pillow: pip install 'regard[images]', or write .svg or .html"
        ) from None
    scale = FINER * SMOOTH
    image = Image.new("RGB", (scale * picture.width, scale * picture.height), PAPER)
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        _paint(image, draw, shape, scale)
    image = image.resize((FINER * picture.width, FINER * picture.height), Image.Resampling.BOX)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _paint(image: Any, draw: Any, shape: Shape, scale: int) -> None:
    match shape:
        case Line():
            width = max(1, round(scale * shape.width))
            for piece in _dashes(shape):
                draw.line([(scale * x, scale * y) for x, y in piece], shape.colour, width, "curve")
        case Dot():
            reach = shape.radius
            box = (shape.x - reach, shape.y - reach, shape.x + reach, shape.y + reach)
            draw.ellipse([scale * each for each in box], shape.colour)
        case Words():
            _write(image, draw, shape, scale)


def _write(image: Any, draw: Any, words: Words, scale: int) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(scale * words.size)
    anchor = {"start": "l", "middle": "m", "end": "r"}[words.anchor] + "s"
    thick = scale // 3 if words.bold else 0
    at = (scale * words.x, scale * words.y)
    if not words.upwards:
        draw.text(at, words.text, words.colour, font, anchor, stroke_width=thick)
        return
    length, height = round(draw.textlength(words.text, font)), 2 * scale * words.size
    strip = Image.new("L", (length, height), 0)
    ImageDraw.Draw(strip).text((0, height // 2), words.text, 255, font, "ls", stroke_width=thick)
    strip = strip.rotate(90, expand=True)
    above = {"start": length, "middle": length / 2, "end": 0}[words.anchor]
    corner = (round(at[0] - height // 2), round(at[1] - above))
    image.paste(Image.new("RGB", strip.size, words.colour), corner, strip)


def _dashes(line: Line, on: float = 6, off: float = 4) -> Iterable[list[tuple[float, float]]]:
    """The pieces of a line that are drawn: all of it, or dashes."""
    if not line.dashed:
        yield list(line.points)
        return
    left, drawing, piece = on, True, [line.points[0]]
    for (x, y), (to_x, to_y) in zip(line.points, line.points[1:], strict=False):
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        at = 0.0
        while length - at > left:
            at += left
            share = at / length
            corner = (x + share * (to_x - x), y + share * (to_y - y))
            if drawing:
                yield [*piece, corner]
            drawing = not drawing
            left, piece = (on if drawing else off), [corner]
        left -= length - at
        piece.append((to_x, to_y))
    if drawing and len(piece) > 1:
        yield piece
