"""A first visit to the studio in Chromium: every panel, no error, no request to elsewhere.

REGARD_AXE names axe.min.js of the npm package axe-core; without it, accessibility is not checked.
REGARD_SCREENSHOTS names a folder for pictures of the panels.
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from regard.serve.studio.app import create_studio
from serve.conftest import serving

HOSTILE = "<img src=x onerror=\"document.title='run'\">"
TEXT = "the small cat sees the old dog. the old dog sees the small cat, and runs.\n" * 400
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
PANELS = ("train", "generate", "inside", "compare", "presets")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """A function that opens the studio of a folder; at the end, nothing may have gone wrong.

    A browser logs every refused request as an error; there may be `refused` of them.
    """
    problems, addresses, started, expected = [], [], [], []

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # a slider that moves on ends the request before
            problems.append(request.url)

    def opened(runs, *, refused=0):
        expected.extend([REFUSED] * refused)
        server = serving([runs], create=create_studio)
        address, running = server.__enter__()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", failed)
        page.on("request", lambda request: addresses.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        started.append((server, running, page, address))
        return page

    yield opened
    for server, running, page, address in started:
        page.close()
        running.app.state.studio.trainer.close()
        server.__exit__(None, None, None)
        assert {url for url in addresses if not url.startswith((address, "data:"))} == set()
    assert problems == expected


def show(page, panel):
    page.locator("#nav").get_by_role("link", name=panel).click()


def move_the_temperature(page, prompt):
    """Type a prompt and move the slider to 0; the first stage then leaves one token."""
    show(page, "Generate")
    page.fill("#prompt", prompt)
    page.wait_for_selector("table.stages")
    page.focus("#slider-temperature")
    page.keyboard.press("Home")
    page.locator("table.stages thead .left", has_text=re.compile("^1 of ")).first.wait_for()


def look_at_a_head(page, text):
    """Show the attention maps of a text, and choose the second head of the first layer."""
    show(page, "Look inside")
    page.fill("#inside-text", text)
    page.keyboard.press("Enter")
    frame = page.frame_locator("#attention")
    frame.get_by_role("button", name="head 1").first.click()
    frame.get_by_role("heading", name="head 1").wait_for()
    page.wait_for_selector("#next-table table")


def test_a_visit_to_a_trained_run(visit, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page = visit(tmp_path / "runs")
    move_the_temperature(page, f"the cat {HOSTILE}")
    page.click("#generate-button")
    page.locator("#generated .prompt", has_text="onerror").wait_for()
    look_at_a_head(page, f"the cat {HOSTILE}")
    assert page.title() == "Look inside – regard studio"  # nothing that was typed is HTML


def check_accessibility(page, where):
    """No serious finding of axe-core."""
    path = os.environ.get("REGARD_AXE")
    if path is None:
        return
    page.evaluate(Path(path).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, (where, serious)


def check_panels(page, minutes):
    """Every panel in both colour schemes and widths: nothing wider than the page, axe-core."""
    folder = os.environ.get("REGARD_SCREENSHOTS")
    for scheme in ("light", "dark"):
        for width in (1280, 375):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            for panel in PANELS:
                page.evaluate(f"location.hash = '#{panel}'")
                page.locator(f"#panel-{panel}").wait_for()
                page.wait_for_timeout(600)
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
                if folder is not None:
                    path = Path(folder) / f"{minutes}-{panel}-{scheme}-{width}.png"
                    page.screenshot(path=path, full_page=True)
                check_accessibility(page, (panel, scheme, width))


@pytest.mark.long
def test_a_first_visit_from_an_empty_folder(visit, tmp_path):
    """Paste a text, train one minute, generate, move a slider, look at a head, compare, presets."""
    page = visit(tmp_path / "runs")
    assert page.locator("#no-runs").is_visible()
    page.fill("#train-text", TEXT)
    page.fill("#train-name", "my-text")
    page.select_option("#train-minutes", "1")
    started = time.monotonic()
    page.click("#train-button")
    page.wait_for_selector("#chart svg", timeout=90_000)
    assert page.locator("#train-button").is_disabled()
    page.locator("#stop").wait_for(state="hidden", timeout=150_000)
    print(f"trained in {time.monotonic() - started:.0f} s", file=sys.stderr)
    assert page.inner_text("#live-status") == "my-text is trained."
    assert page.locator("#samples li").count() >= 1
    assert "perplexity" in page.inner_text("#numbers")
    move_the_temperature(page, "the small ")
    page.click("#generate-button")
    page.locator("#generated", has_text="cat").wait_for()
    look_at_a_head(page, "the small cat sees the old dog.")
    page.select_option("#figure-name", "positions")
    page.click("#figure-button")
    page.wait_for_selector("#figure img", timeout=60_000)
    show(page, "Compare")
    page.fill("#compare-prompt", "the old ")
    page.keyboard.press("Enter")
    page.locator("#compare-out .numbers table").nth(1).wait_for()
    texts = page.locator("#compare-out output").all_inner_texts()
    assert texts[0] == texts[1] != "the old "  # the same run and seed
    show(page, "Presets")
    page.select_option("#preset-b", "bert-base")
    page.locator("#differences td", has_text="encoder").first.wait_for()
    check_panels(page, "first-visit")


@pytest.mark.long
def test_a_training_is_stopped_and_resumed(visit, tmp_path):
    page = visit(tmp_path / "runs", refused=2)
    page.fill("#train-text", TEXT)
    page.select_option("#train-minutes", "")
    page.click("#train-form summary")
    settings = "train.steps=400 model.layers=2 model.dim=64 train.evaluate_every=50"
    page.fill("#train-settings", settings)
    page.click("#train-button")
    page.locator("#live-step", has_text="Step ").wait_for(timeout=90_000)
    page.fill("#train-name", "another")
    page.click("#stop")
    page.locator("#live-status", has_text="stopped and saved").wait_for(timeout=60_000)
    page.click("#resume")
    page.locator("#live-status", has_text="my-text is trained.").wait_for(timeout=150_000)
    page.fill("#train-name", "my-text")
    page.click("#train-button")
    page.locator("#train-error", has_text="There is a run 'my-text' already").wait_for()
    page.fill("#train-name", "../x")
    page.click("#train-button")
    page.locator("#train-error", has_text="cannot be the name of a run").wait_for()
    page.fill("#train-settings", "model.dim=abc")
    page.fill("#train-name", "wrong")
    page.click("#train-button")
    page.locator("#train-error", has_text="Model.dim must be an integer").wait_for(timeout=60_000)
