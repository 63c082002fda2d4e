"""The interactive page of attention maps: its data, and how it behaves in a real browser.

REGARD_AXE names axe.min.js of the npm package axe-core; without it, accessibility is not checked.
"""

import base64
import html
import json
import os
import re
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.errors import ConfigError
from regard.explain import AttentionMap, AttentionMaps, StateMap, StateMaps, attention_entropy
from regard.explain.render import explorer as module
from regard.explain.token_map import PatchGridImage

HOSTILE = "<img src=x onerror=document.title=1>"
TOKENS = [" the", " cat", " sat", HOSTILE, "</div></script><script>document.title=2</script>"]


def causal(heads, size, seed=0):
    scores = 2 * torch.randn(heads, size, size, generator=torch.Generator().manual_seed(seed))
    later = torch.ones(size, size).triu(1).bool()
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def meta(page):
    (text,) = re.findall(r'class="regard-meta">(.*?)</div>', page, re.DOTALL)
    return json.loads(html.unescape(text))


def stored(page, number, head):
    """The weights of a head as the script reads them."""
    table = meta(page)["maps"][number]
    (text,) = re.findall(f'data-weights="{number}.{head}">(.*?)</div>', page)
    raw = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).astype(float)
    high, low = raw.reshape(2, *table["shape"][1:])
    whole = 256 * high + low
    scaled = (whole - 32768) / 32767 if table["signed"] else whole / 65535
    return scaled * table["max"]


def test_the_page_has_the_weights_of_every_head_and_their_mean():
    weights = causal(3, 5)
    page = AttentionMaps({"a": AttentionMap(TOKENS, TOKENS, weights)})._repr_html_()
    assert meta(page)["maps"][0]["headings"] == ["head 0", "head 1", "head 2", "mean"]
    for head in range(3):
        np.testing.assert_allclose(stored(page, 0, head), weights[head], atol=1 / 65535)
    np.testing.assert_allclose(stored(page, 0, 3), weights.mean(0), atol=1 / 65535)
    assert meta(page)["labels"][0][3] == HOSTILE.replace(" ", "␣")
    assert HOSTILE not in page


def test_signed_values_keep_their_sign():
    values = torch.randn(2, 3, 4)
    each = StateMap(list("abc"), list("wxyz"), values, ["forget_gate", "state"])
    page = each._repr_html_()
    assert meta(page)["maps"][0]["headings"] == ["forget_gate", "state"]
    np.testing.assert_allclose(stored(page, 0, 1), values[1], atol=float(values.abs().max()) / 3e4)
    assert repr(each) == "StateMap(forget_gate, state: 3 tokens × 4 units)"


def test_maps_beyond_the_limit_are_pooled_and_say_so(monkeypatch):
    monkeypatch.setattr(module, "MAX_CELLS", 100)
    weights = causal(1, 20)
    tokens = [str(n) for n in range(20)]
    page = AttentionMaps({"a": AttentionMap(tokens, tokens, weights)})._repr_html_()
    table = meta(page)["maps"][0]
    assert (table["shape"], table["full"], table["pooled"]) == ([1, 10, 10], [20, 20], True)
    assert stored(page, 0, 0).max() == pytest.approx(float(weights.max()), abs=1e-4)


def test_the_entropy_of_a_head_is_that_of_its_weights_before_pooling(monkeypatch):
    weights, tokens = causal(2, 20), [str(n) for n in range(20)]
    monkeypatch.setattr(module, "MAX_CELLS", 100)
    page = AttentionMaps({"a": AttentionMap(tokens, tokens, weights)})._repr_html_()
    expected = [*attention_entropy(weights).mean(-1), attention_entropy(weights.mean(0)).mean()]
    assert meta(page)["maps"][0]["entropy"] == pytest.approx([float(x) for x in expected])
    states = StateMap(tokens, tokens, weights, ["reset_gate", "state"])  # no probabilities
    assert meta(states._repr_html_())["maps"][0]["entropy"] == []


def test_all_layers_are_saved_as_a_page_or_a_figure(tmp_path):
    weights = causal(2, 3)
    maps = AttentionMaps(
        {f"layer {n}": AttentionMap(list("xyz"), list("xyz"), weights + n) for n in range(3)}
    )
    maps.save(tmp_path / "a.html")
    assert "Content-Security-Policy" in (tmp_path / "a.html").read_text("utf-8")
    for suffix in ("svg", "png", "pdf"):
        maps.save(tmp_path / f"a.{suffix}")
    assert "layer 2" in (tmp_path / "a.svg").read_text("utf-8")
    figure = maps.figure()
    assert [axes.get_label() for axes in figure.axes] == [f"layer {n // 2}" for n in range(6)]
    assert [axes.get_title() for axes in figure.axes] == ["head 0", "head 1"] * 3
    assert np.array_equal(figure.axes[3].images[0].get_array(), weights[1] + 1)
    assert len(maps.figure(head=1).axes) == 3
    states = StateMap(["a"], ["0"], torch.tensor([[[0.5]], [[-1.0]]]), ["input_gate", "state"])
    gate, state = StateMaps({"cell": states}).figure().axes
    assert gate.get_title() == "input gate"
    assert state.images[0].get_cmap().name == "RdBu_r"
    with pytest.raises(ConfigError, match="figures are written as"):
        maps.save(tmp_path / "a.gif")


@pytest.fixture
def open_page(browser, tmp_path):
    """A function that saves maps, opens them, and checks that the browser complains of nothing."""
    problems, pages = [], []

    def opened(maps, **options):
        path = tmp_path / "maps.html"
        maps.save(path)
        page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: pages.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("[data-shown]", timeout=20_000)
        return page

    yield opened
    assert problems == []
    assert {url.rsplit("/", 1)[1] for url in pages} == {"maps.html"}


def check_accessibility(page):
    if (path := os.environ.get("REGARD_AXE")) is not None:
        page.evaluate(Path(path).read_text(encoding="utf-8"))
        assert page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"] == []


@pytest.mark.long
def test_hovering_clicking_and_keys_show_the_right_number(open_page):
    weights = causal(2, 5)
    maps = AttentionMaps(
        {
            f"layer {n}": AttentionMap(TOKENS, TOKENS, weights if n else weights.flip(0))
            for n in range(2)
        }
    )
    page = open_page(maps)
    assert page.title() == "attention"  # no token was run as a script
    assert page.locator("img").count() == 0
    canvas = page.locator("canvas.map")
    box = canvas.bounding_box()
    # the lower right corner of the map is the last token on itself
    x, y = box["x"] + box["width"] - 10 - 13, box["y"] + box["height"] - 10 - 13
    page.mouse.move(x - 26, y)
    expected = float(weights[1, 4, 3])
    assert page.locator(".tip").inner_text().endswith(f"(3): {expected:.4f}")
    assert HOSTILE.replace(" ", "␣") in page.locator(".tip").inner_text()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("status").inner_text().endswith(f"(1): {float(weights[1, 4, 1]):.4f}")
    page.get_by_role("button", name="layer 1, head 0").click()
    page.get_by_role("heading", name="layer 1, head 0").wait_for()
    page.keyboard.press("ArrowRight")  # from head 0 to head 1
    page.get_by_role("heading", name="layer 1, head 1").wait_for()
    page.get_by_role("button", name="Arcs").click()
    assert page.locator("svg path").count() > 5
    page.locator(".tokens button").nth(2).hover()
    shown = page.locator(".side td:last-child").first.inner_text()
    assert shown == f"{float(weights[1, 2].max()):.4f}"
    check_accessibility(page)


@pytest.mark.long
def test_weights_that_load_late_do_not_replace_those_of_the_head_chosen_last(open_page):
    weights = causal(3, 5)
    page = open_page(AttentionMaps({"layer 0": AttentionMap(TOKENS, TOKENS, weights)}))
    page.evaluate(
        """() => {  // the next weights arrive when `finish` is called, later ones at once
            const original = Response.prototype.arrayBuffer;
            Response.prototype.arrayBuffer = function () {
                Response.prototype.arrayBuffer = original;
                const loaded = original.call(this);
                return new Promise(resolve => { window.finish = () => resolve(loaded); });
            };
        }"""
    )
    page.get_by_role("button", name="layer 0, head 1").click()
    page.get_by_role("button", name="layer 0, head 2").click()
    page.get_by_role("heading", name="layer 0, head 2").wait_for()
    page.evaluate("window.finish(), new Promise(resolve => setTimeout(resolve, 100))")
    box = page.locator("canvas.map").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 49, box["y"] + box["height"] - 23)
    shown = page.locator(".tip").inner_text().rpartition("(3): ")[2]
    assert float(shown) == pytest.approx(float(weights[2, 4, 3]), abs=1e-4)  # that of head 1: 0.002


@pytest.mark.long
def test_the_tokens_of_a_pooled_cell_are_named_by_their_positions(open_page, monkeypatch):
    monkeypatch.setattr(module, "MAX_CELLS", 144)
    weights = causal(1, 16)
    tokens = [f"t{n}" for n in range(16)]
    page = open_page(AttentionMaps({"a": AttentionMap(tokens, tokens, weights)}))
    canvas = page.locator("canvas.map")
    canvas.focus()
    for _ in range(11):
        page.keyboard.press("ArrowRight")  # 12 × 12 cells: the last is that of tokens 14 and 15
    largest = f"{float(weights[0, 14:, 14:].max()):.4f}"
    expected = f"“t14” (14–15) → “t14” (14–15): largest {largest}"
    assert page.get_by_role("status").inner_text() == expected
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 23, box["y"] + box["height"] - 23)
    assert page.locator(".tip").inner_text() == expected


@pytest.mark.long
def test_twelve_layers_of_twelve_heads_of_512_tokens_open_in_two_seconds(browser, tmp_path):
    tokens = [f"token {n}" for n in range(512)]
    maps = AttentionMaps(
        {f"layer {n}": AttentionMap(tokens, tokens, causal(12, 512, n)) for n in range(12)}
    )
    maps.save(tmp_path / "maps.html")
    seconds = []
    for _ in range(3):
        page = browser.new_page()
        begin = time.perf_counter()
        page.goto((tmp_path / "maps.html").as_uri())
        page.wait_for_selector("[data-shown]", timeout=30_000)
        seconds.append(time.perf_counter() - begin)
        assert page.locator(".overview button").count() == 12 * 13
        page.close()
    print(f"opened in {min(seconds):.2f} s")
    assert min(seconds) < 2


@pytest.mark.long
def test_images_alignments_and_states_are_shown_in_dark_too(open_page):
    patches = ["<cls>", *(f"{n // 2},{n % 2}" for n in range(4))]
    pixels = torch.zeros(1, 8, 8, dtype=torch.uint8)
    shown, below = PatchGridImage(pixels, (2, 2), 1), PatchGridImage(pixels, (2, 2))
    words = torch.randn(2, 2, 4).softmax(-1)
    maps = AttentionMaps(
        {
            "image": AttentionMap(patches, patches, causal(2, 5), None, "self", shown),
            "caption": AttentionMap(["a", "cat"], patches[1:], words, None, "cross", below),
            "cross": AttentionMap(["un", "chat"], ["a", "cat"], causal(2, 2), None, "cross"),
            "lstm": StateMap(["a", "b"], ["0", "1"], torch.randn(1, 2, 2), ["state"]),
        }
    )
    page = open_page(maps, color_scheme="dark")
    assert page.locator("[data-regard]").get_attribute("data-theme") == "dark"
    page.get_by_role("heading", name="cross, head 0").wait_for()  # an alignment is shown first
    page.get_by_role("button", name="image, head 0").click()
    page.get_by_role("button", name="Image", exact=True).click()
    image = page.get_by_role("application", name="the image")
    box = image.bounding_box()
    page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
    assert page.get_by_role("status").inner_text().startswith("“0,1” (2) → “0,1” (2): ")
    image.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("status").inner_text().startswith("“1,0” (3) → “1,0” (3): ")
    check_accessibility(page)
    page.get_by_role("button", name="caption, head 0").click()
    page.get_by_role("heading", name="caption, head 0").wait_for()
    page.get_by_role("button", name="cat", exact=True).click()
    page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.75 * box["height"])
    number = f"{float(words[0, 1, 3]):.4f}"
    assert page.get_by_role("status").inner_text() == f"“cat” (1) → “1,1” (3): {number}"
    for name in ("cross, mean", "lstm, state"):
        page.get_by_role("button", name=name).click()
        page.get_by_role("heading", name=name).wait_for()
    assert not page.get_by_role("button", name="Arcs").is_visible()
    check_accessibility(page)


@pytest.mark.long
def test_the_theme_of_the_notebook_is_followed_when_it_changes(open_page):
    page = open_page(AttentionMaps({"layer 0": AttentionMap(TOKENS, TOKENS, causal(2, 5))}))
    for name, value, theme in (
        ("class", "vscode-dark", "dark"),
        ("class", "vscode-light", "light"),
        ("class", "vscode-high-contrast", "dark"),
        ("class", "vscode-high-contrast-light vscode-high-contrast", "light"),
        ("data-jp-theme-light", "false", "dark"),
        ("data-jp-theme-light", "true", "light"),
    ):
        page.evaluate("([name, value]) => document.body.setAttribute(name, value)", [name, value])
        page.locator(f"[data-theme={theme}]").wait_for()
        pixel = page.locator("canvas.map").evaluate(
            """canvas => {  // in the cell at the upper right, whose weight is 0
                const copy = new OffscreenCanvas(1, 1).getContext("2d");
                copy.drawImage(canvas, 23 - canvas.width, 4.5 * 26 + 10 - canvas.height);
                return [...copy.getImageData(0, 0, 1, 1).data];
            }"""
        )
        assert pixel == ([20, 23, 28, 255] if theme == "dark" else [255, 255, 255, 255])


@pytest.mark.long
def test_a_notebook_does_not_receive_the_keys_that_the_map_uses(open_page):
    page = open_page(AttentionMaps({"layer 0": AttentionMap(TOKENS, TOKENS, causal(2, 5))}))
    page.evaluate(
        "() => { window.seen = []; window.onkeydown = ({key}) => window.seen.push(key); }"
    )
    page.locator("canvas.map").focus()
    for key in ("ArrowUp", "ArrowLeft", "+", "Escape", "a"):
        page.keyboard.press(key)
    page.get_by_role("button", name="layer 0, head 0").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("heading", name="layer 0, head 1").wait_for()
    page.get_by_role("button", name="Arcs").focus()
    page.keyboard.press("Enter")
    assert page.locator("svg path").count() > 0
    page.keyboard.press("b")
    assert page.evaluate("window.seen") == ["a", "b"]


@pytest.mark.long
def test_the_arrow_keys_move_along_the_tokens_and_the_number_is_that_of_the_shown_head(open_page):
    weights = causal(2, 5)
    page = open_page(AttentionMaps({"layer 0": AttentionMap(TOKENS, TOKENS, weights)}))
    page.locator(".tokens button").nth(1).click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    status = page.get_by_role("status")
    assert status.inner_text().endswith(f"(3) → “␣the” (0): {float(weights[0, 3, 0]):.4f}")
    page.get_by_role("button", name="layer 0, head 1").click()
    page.get_by_role("heading", name="layer 0, head 1").wait_for()
    assert status.inner_text().endswith(f"(3) → “␣the” (0): {float(weights[1, 3, 0]):.4f}")


@pytest.mark.long
def test_a_map_fits_a_narrow_page(open_page):
    tokens = [f"token {n}" for n in range(30)]
    names = ["input_gate", "state"]
    maps = AttentionMaps(
        {
            "a": AttentionMap(tokens, tokens, causal(4, 30)),
            "lstm": StateMap(tokens, tokens, torch.randn(2, 30, 30), names),
        }
    )
    page = open_page(maps)
    page.set_viewport_size({"width": 375, "height": 800})
    for name in ("a, head 1", "lstm, state"):
        page.get_by_role("button", name=name).click()
        page.get_by_role("heading", name=name).wait_for()
        box = page.locator("canvas.map").bounding_box()
        assert box["x"] + box["width"] <= 375
        if name == "a, head 1":
            page.get_by_role("button", name="Arcs").click()
            assert page.locator("svg").bounding_box()["width"] <= 375
            page.get_by_role("button", name="Map").click()


@pytest.mark.long
def test_the_page_of_a_figure_fits_a_phone_and_has_a_dark_theme(browser, tmp_path):
    regard.show("path-lengths").save(tmp_path / "figure.html")
    for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
        page = browser.new_page(viewport={"width": 375, "height": 700}, color_scheme=scheme)
        page.goto((tmp_path / "figure.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 375  # only main scrolls
        assert page.locator("svg").bounding_box()["width"] == pytest.approx(560, abs=1)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        page.get_by_text("as text").click()
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        page.close()
    page = browser.new_page(viewport={"width": 1280, "height": 700})
    page.goto((tmp_path / "figure.html").as_uri())
    assert page.locator("svg").bounding_box()["width"] == pytest.approx(829, abs=30)  # its own size


NOTEBOOK = """
import torch
import regard
from regard.explain import ablate, trace
from regard.explain.image_attention import ImageAttentionMap
from regard.explain.token_map import PatchGridImage

open("cats.txt", "w").write("the cat sat on the mat\\n" * 30)
def train(preset, **sizes):
    model = regard.preset(preset, dim=16, layers=1, **sizes)
    return regard.train("cats.txt", model=model, steps=3, tokenizer="char", out=preset, quiet=True)
run, lstm = train("tiny-decoder", heads=2), train("lstm")
ids = torch.tensor([run.tokenizer.encode("the cat")])
pixels = torch.zeros(3, 8, 8, dtype=torch.uint8)
"""
SHOWN = {  # expressions, each the end of a cell, and what its HTML holds
    "run.attention('the cat')": "regard-attention",
    "run.attention('the cat')['decoder.blocks.0.attention']": "regard-attention",
    "run.explain('the cat')": "regard-attention",
    "lstm.states('the cat')": "regard-attention",
    "ImageAttentionMap(['a'], list('wxyz'), torch.ones(1, 1, 4) / 4, None, 'cross', "
    "PatchGridImage(pixels, (2, 2)))": "regard-attention",
    "with trace(run.model, '*.out_hook') as seen:\n    run.model(ids)\nseen": "out_hook",
    "run.find_heads()": "induction",
    "run.logit_lens('the cat')": "layer 0",
    "run.attribution('the cat')": "<span",
    "run.gradients('the cat')": "decoder.blocks.0",
    "regard.show('next-token', run, 'the cat')": "Next-token",
    "regard.show('gates', lstm, 'the cat')": "<svg",
}


@pytest.mark.long
def test_every_object_shows_itself_in_one_executed_notebook(browser, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(cell) for cell in (NOTEBOOK, *SHOWN)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=120, resources=resources
    ).execute()
    outputs = []
    for cell, expected in zip(notebook.cells[1:], SHOWN.values(), strict=True):
        (output,) = (each for each in cell.outputs if each.output_type == "execute_result")
        assert expected in output.data["text/html"], cell.source
        outputs.append(output.data["text/html"])
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{''.join(outputs)}", "utf-8")
    page = browser.new_page()
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "notebook.html").as_uri())
    page.wait_for_function("document.querySelectorAll('[data-shown]').length === 5")
    assert problems == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids)) > 0
