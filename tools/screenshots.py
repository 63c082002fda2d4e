"""Screenshots of the page of attention maps for docs/inspection.md, in Debian's Chromium.

It opens a run that `make images` trains, so run that first. It needs chromium and playwright.

python tools/screenshots.py
"""

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import regard

ROOT = Path(__file__).parents[1]
MAP = "decoder.blocks.1.cross, mean"
SHOTS = {  # width, colour scheme, view
    "explorer": (1000, "light", "Map"),
    "explorer-dark": (1000, "dark", "Arcs"),
    "explorer-phone": (375, "light", "Map"),
}


def main() -> None:
    """Take the screenshots, and write them as PNG files of 96 colours."""
    run = regard.load(ROOT / "runs" / "images", device="cpu")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder, "attention.html")
        run.attention("seven hundred ninety-nine").save(page_file)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, scheme, view) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": 600}, color_scheme=scheme, device_scale_factor=1
            )
            page.goto(page_file.as_uri())
            page.wait_for_selector("[data-shown]")
            page.get_by_role("button", name=MAP).click()
            page.get_by_role("heading", name=MAP).wait_for()
            page.get_by_role("button", name=view, exact=True).click()
            image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            path = ROOT / "docs" / "images" / f"{name}.png"
            image.convert("RGB").quantize(96).save(path, optimize=True)
            print(path.relative_to(ROOT), path.stat().st_size)
        browser.close()


if __name__ == "__main__":
    main()
