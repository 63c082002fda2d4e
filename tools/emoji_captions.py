"""Cut the sheet of emoji_captions into a folder of images with a table of their captions.

python tools/emoji_captions.py SOURCE OUT

SOURCE holds sheet_64.png and captions.json. The column `group` is the emoji without its skin tone,
so that `regard train` puts all tones of an emoji into the same split.
"""

import csv
import json
import sys
from pathlib import Path

from PIL import Image

PITCH, SIDE = 66, 64  # distance between two images and side of an image, in pixels
SKIN_TONES = {f"1F3F{digit}" for digit in "BCDEF"}


def main(source: Path, out: Path) -> None:
    """Write OUT/captions.csv and OUT/images."""
    (out / "images").mkdir(parents=True)
    sheet = Image.open(source / "sheet_64.png").convert("RGBA")
    rows = json.loads((source / "captions.json").read_text(encoding="utf-8"))
    with (out / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "en", "fr", "de", "group"])
        for row in rows:
            left, top = PITCH * row["x"] + 1, PITCH * row["y"] + 1
            image = sheet.crop((left, top, left + SIDE, top + SIDE))
            background = Image.new("RGBA", image.size, "white")
            Image.alpha_composite(background, image).convert("RGB").save(
                out / "images" / f"{row['hex']}.png"
            )
            base = [part for part in row["hex"].split("-") if part not in {*SKIN_TONES, "FE0F"}]
            writer.writerow([f"{row['hex']}.png", row["en"], row["fr"], row["de"], "-".join(base)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
