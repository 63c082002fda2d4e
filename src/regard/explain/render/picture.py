"""A picture as a list of shapes, and its encodings: SVG and PNG."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.sax.saxutils import escape

from regard.errors import ConfigError

FOREGROUND, BACKGROUND = "#222222", "#ffffff"
PNG_SCALE = 2  # PNG pixels per unit, for high-resolution screens
SUPERSAMPLING = 3  # drawn this much larger, then shrunk: anti-aliasing

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str = FOREGROUND
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle, with a tooltip in SVG."""

    x: float
    y: float
    radius: float
    colour: str = FOREGROUND
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline starts, ends or is centred at a point; `upwards` rotates it."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    size: int = 12
    colour: str = FOREGROUND
    bold: bool = False
    upwards: bool = False


Shape = Line | Dot | Label


@dataclass(slots=True)
class Picture:
    """Shapes on white, in pixels from the top left; later shapes are drawn over earlier ones."""

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


def encode(picture: Picture, suffix: str) -> bytes:
    """The bytes of a file with this suffix, `.svg` or `.png`."""
    return to_png(picture) if suffix == ".png" else to_svg(picture).encode()


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
            tooltip = f"<title>{escape(shape.tooltip)}</title>" if shape.tooltip else ""
            return (
                f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" '
                f'fill="{shape.colour}">{tooltip}</circle>'
            )
        case Label():
            x, y = f"{shape.x:.1f}", f"{shape.y:.1f}"
            position = f'x="{x}" y="{y}"'
            if shape.upwards:
                position = f'transform="translate({x} {y}) rotate(-90)"'
            weight = ' font-weight="bold"' if shape.bold else ""
            return (
                f'<text {position} text-anchor="{shape.anchor}" font-size="{shape.size}" '
                f'fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'
            )


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG, drawn with Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError:
        raise ConfigError(
            "a .png needs Pillow: pip install 'regard[images]', or write .svg or .html"
        ) from None
    scale = PNG_SCALE * SUPERSAMPLING
    image = Image.new("RGB", (scale * picture.width, scale * picture.height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        _paint(image, draw, shape, scale)
    image = image.resize(
        (PNG_SCALE * picture.width, PNG_SCALE * picture.height), Image.Resampling.BOX
    )
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _paint(image: Any, draw: Any, shape: Shape, scale: int) -> None:
    match shape:
        case Line():
            width = max(1, round(scale * shape.width))
            for dash in _dashes(shape):
                draw.line([(scale * x, scale * y) for x, y in dash], shape.colour, width, "curve")
        case Dot():
            radius = shape.radius
            box = (shape.x - radius, shape.y - radius, shape.x + radius, shape.y + radius)
            draw.ellipse([scale * edge for edge in box], shape.colour)
        case Label():
            _draw_text(image, draw, shape, scale)


def _draw_text(image: Any, draw: Any, label: Label, scale: int) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(scale * label.size)
    anchor = {"start": "l", "middle": "m", "end": "r"}[label.anchor] + "s"
    stroke = scale // 3 if label.bold else 0
    baseline = (scale * label.x, scale * label.y)
    if not label.upwards:
        draw.text(baseline, label.text, label.colour, font, anchor, stroke_width=stroke)
        return
    length, height = round(draw.textlength(label.text, font)), 2 * scale * label.size
    strip = Image.new("L", (length, height), 0)
    ImageDraw.Draw(strip).text((0, height // 2), label.text, 255, font, "ls", stroke_width=stroke)
    strip = strip.rotate(90, expand=True)
    above = {"start": length, "middle": length / 2, "end": 0}[label.anchor]
    corner = (round(baseline[0] - height // 2), round(baseline[1] - above))
    image.paste(Image.new("RGB", strip.size, label.colour), corner, strip)


def _dashes(line: Line, on: float = 6, off: float = 4) -> Iterable[list[tuple[float, float]]]:
    """The drawn segments of a line: all of it, or its dashes."""
    if not line.dashed:
        yield list(line.points)
        return
    remaining, drawing, dash = on, True, [line.points[0]]
    for (x, y), (to_x, to_y) in zip(line.points, line.points[1:], strict=False):
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        done = 0.0
        while length - done > remaining:
            done += remaining
            fraction = done / length
            corner = (x + fraction * (to_x - x), y + fraction * (to_y - y))
            if drawing:
                yield [*dash, corner]
            drawing = not drawing
            remaining, dash = (on if drawing else off), [corner]
        remaining -= length - done
        dash.append((to_x, to_y))
    if drawing and len(dash) > 1:
        yield dash
