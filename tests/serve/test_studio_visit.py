"""A first visit to the studio in Chromium: every panel, no error, no request to elsewhere.

REGARD_AXE names axe.min.js of the npm package axe-core; without it, accessibility is not checked.
REGARD_SCREENSHOTS names a folder for pictures of the panels.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from cli.conftest import materials, trained  # noqa: F401 -- fixtures
from regard.serve.studio.app import create_studio
from regard.serve.worker import EngineThread
from serve.conftest import serving

HOSTILE = "<img src=x onerror=\"document.title='run'\">"
TEXT = "the small cat sees the old dog. the old dog sees the small cat, and runs.\n" * 400
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
PANELS = ("train", "generate", "inside", "compare", "presets")
ODD_TEXTS = [  # none of them may run, break a panel or leave it without an answer
    HOSTILE,
    "القطة الصغيرة ترى الكلب",  # right to left
    "👩\u200d🚀 e\u0301 \u202egnp.exe 日本語",  # joiners, accents, a reversal of direction
    "\x00\x07\t\\ \"'`</script>",
    " ",
    "the cat " * 500,
]


@pytest.fixture
def visit(browser, tmp_path):
    """A function that opens the studio of a folder; at the end, nothing may have gone wrong.

    A browser logs every refused request as an error; there may be `refused` of them, or with
    `refusals` any number.
    """
    problems, addresses, started, expected, ignored = [], [], [], [], set()

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # a slider that moves on ends the request before
            problems.append(request.url)

    def opened(runs, *, refused=0, refusals=False):
        expected.extend([REFUSED] * refused)
        ignored.update([REFUSED] if refusals else [])
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
    assert [problem for problem in problems if problem not in ignored] == expected


def show(page, panel):
    page.locator("#nav").get_by_role("link", name=panel).click()


def move_the_temperature(page, prompt):
    """Type a prompt and move the slider to 0; the first stage then leaves one token."""
    show(page, "Generate")
    page.fill("#prompt", prompt)
    page.wait_for_selector("table.stages")
    page.focus("#slider-temperature")
    page.keyboard.press("Home")
    page.locator("table.stages thead .remaining", has_text=re.compile("^1 of ")).first.wait_for()


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


def test_the_page_is_used_with_the_keyboard_alone(visit, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page = visit(tmp_path / "runs")

    def tab_to(name):
        """Press Tab until the element of this id or text has the focus."""
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "[document.activeElement.id, document.activeElement.textContent.trim()]"
            )
            if name in focused:
                return
        raise AssertionError(f"{name} cannot be reached")

    for panel, title in (("Presets", "Presets"), ("Compare", "Compare"), ("Generate", "Generate")):
        page.reload()
        page.wait_for_selector("html[data-ready]")
        tab_to(panel)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=title, exact=True).wait_for()
    tab_to("prompt")
    page.keyboard.type("the cat")
    tab_to("slider-temperature")
    page.keyboard.press("Home")
    page.locator("table.stages thead .remaining", has_text=re.compile("^1 of ")).first.wait_for()
    tab_to("generate-button")
    page.keyboard.press("Enter")
    page.locator("#generated .prompt", has_text="the cat").wait_for()


def test_the_numbers_of_a_map_are_those_of_the_api(visit, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page, text = visit(tmp_path / "runs"), "the cat sat"
    look_at_a_head(page, text)
    frame = page.frame_locator("#attention")
    rows = frame.locator("table", has_text="largest weights").locator("tr")
    rows.first.wait_for()
    shown = {
        int(place.strip("()")): float(weight)
        for _, place, weight in (row.split("\t") for row in rows.all_inner_texts())
    }
    body = json.dumps({"model": "cats", "text": text, "layer": 0}).encode()
    request = urllib.request.Request(
        page.url.partition("#")[0] + "explain", body, {"Content-Type": "application/json"}
    )
    answer = json.loads(urllib.request.urlopen(request).read())
    ((_, attention),) = answer["attention"].items()
    weights = attention["weights"][1][-1]  # the second head, the last row
    assert len(shown) == len(weights)
    assert [shown[n] for n in range(len(shown))] == pytest.approx(weights, abs=1e-3)


def screenshot(page, name):
    if (folder := os.environ.get("REGARD_SCREENSHOTS")) is not None:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    check_accessibility(page, name)


def test_two_texts_and_a_series_are_predicted(visit, text_run, entailment_run, tmp_path):
    shutil.copytree(entailment_run, tmp_path / "runs" / "entails")
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    (tmp_path / "waves.csv").write_text("\n".join(["height", *(str(n % 7) for n in range(300))]))
    trained(tmp_path / "runs" / "waves", tmp_path / "waves.csv", [])
    page = visit(tmp_path / "runs")
    show(page, "Generate")
    page.select_option("#generate-run", "entails")
    page.locator("#stages", has_text="predicts from premise and hypothesis").wait_for()
    assert page.inner_text("label[for=prompt]") == "Premise"
    page.fill("#prompt", "cat 1")
    page.click("#generate-button")
    page.locator("#generate-error", has_text="fill in both fields").wait_for()
    page.get_by_role("textbox", name="Hypothesis").fill("dog\n1")  # a text may have several lines
    page.click("#generate-button")
    page.locator("#generated", has_text=re.compile("(odd|even) .* %")).wait_for()
    screenshot(page, "generate-two-texts")
    page.select_option("#generate-run", "waves")
    page.locator("#stages", has_text="forecasts a series of numbers").wait_for()
    assert page.locator("#prompt-second").is_hidden()
    assert page.inner_text("label[for=prompt]") == "Prompt"
    page.fill("#prompt", ", ".join(str(n % 7) for n in range(300)))
    page.click("#generate-button")
    page.locator("#generated", has_text=re.compile(r"^\d(\.\d+)?\n")).wait_for()
    show(page, "Look inside")
    page.select_option("#inside-run", "entails")
    page.fill("#inside-text", "cat 1")
    page.keyboard.press("Enter")
    page.locator("#attention-error", has_text="fill in both fields").wait_for()
    page.locator("#next-table", has_text="so there is no table").wait_for()
    page.get_by_role("textbox", name="Hypothesis").fill("dog 1")
    page.keyboard.press("Enter")
    page.frame_locator("#attention").get_by_role("button", name="head 1").first.wait_for()
    screenshot(page, "inside-two-texts")


def test_two_runs_that_read_two_texts_are_compared(visit, text_run, entailment_run, tmp_path):
    """A run that reads one text beside them is given the first."""
    for name in ("entails", "entails-2"):
        shutil.copytree(entailment_run, tmp_path / "runs" / name)
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page = visit(tmp_path / "runs")
    show(page, "Compare")
    page.select_option("#compare-a", "cats")
    page.select_option("#compare-b", "cats")
    assert page.locator("#compare-prompt-second").is_hidden()
    page.select_option("#compare-a", "entails")
    page.get_by_role("textbox", name="Premise").fill("cat 1")
    page.keyboard.press("Enter")
    first, second = (page.locator(f"[data-side={side}]") for side in "ab")
    first.locator(".error", has_text="fill in both fields").wait_for()
    second.locator(".prompt", has_text="cat 1").wait_for()
    page.select_option("#compare-b", "entails-2")
    page.get_by_role("textbox", name="Hypothesis").fill("dog 1")
    page.keyboard.press("Enter")
    for card in (first, second):
        card.locator("output", has_text=re.compile("(odd|even) .* %")).wait_for()
        card.locator(".numbers", has_text="accuracy").wait_for()
    assert first.locator("output").inner_text() == second.locator("output").inner_text()
    screenshot(page, "compare-two-texts")
    page.set_viewport_size({"width": 375, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    screenshot(page, "compare-two-texts-375")


def post(page, path, body):
    """The answer of the studio of this page."""
    address = page.url.partition("#")[0].rstrip("/")
    content = json.dumps(body).encode()
    request = urllib.request.Request(address + path, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_run_with_a_chat_template_responds(visit, text_run, chat_run, tmp_path):
    """Its text is that of /v1/chat/completions; without the template, of /v1/completions."""
    shutil.copytree(chat_run, tmp_path / "runs" / "chat")
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page = visit(tmp_path / "runs")
    options = {"model": "chat", "seed": 1, "max_tokens": 12}
    messages = [{"role": "user", "content": "7 cats"}]
    chat = post(page, "/v1/chat/completions", {**options, "messages": messages})
    response = chat["choices"][0]["message"]["content"]
    text = post(page, "/v1/completions", {**options, "prompt": "7 cats"})["choices"][0]["text"]
    assert response != text
    show(page, "Generate")
    page.select_option("#generate-run", "cats")
    page.fill("#prompt", "7 cats")
    page.fill("#tokens", "12")
    page.locator("table.stages").wait_for()
    assert page.locator("#prompt-chat-field").is_hidden()
    page.select_option("#generate-run", "chat")
    template = page.get_by_role("checkbox", name="Apply the chat template")
    template.wait_for()
    assert "as in regard chat" in page.inner_text("#prompt-chat-field")
    page.click("#formatted summary")
    page.locator("#formatted-text", has_text="<|im_start|>user").wait_for()

    def generated(expected):
        page.click("#generate-button")
        page.wait_for_function(
            "text => document.getElementById('generated').textContent === text", arg=expected
        )

    generated(f"7 cats\n{response}")
    screenshot(page, "generate-chat")
    template.uncheck()
    page.locator("#formatted").wait_for(state="hidden")
    generated(f"7 cats{text}")
    page.emulate_media(color_scheme="dark")
    template.check()
    page.locator("#formatted").wait_for()
    page.set_viewport_size({"width": 375, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    screenshot(page, "generate-chat-dark-375")
    page.set_viewport_size({"width": 1280, "height": 900})
    show(page, "Compare")
    page.select_option("#compare-a", "chat")
    page.select_option("#compare-b", "cats")
    page.get_by_role("checkbox", name="Apply the chat template").wait_for()
    page.fill("#compare-prompt", "7 cats")
    page.fill("#compare-tokens", "12")
    page.keyboard.press("Enter")
    page.locator("[data-side=a] h3", has_text="First token of the response").wait_for()
    assert page.locator("[data-side=a] output").text_content() == f"7 cats\n{response}"
    page.locator("[data-side=b] h3", has_text="Next token after the prompt").wait_for()
    screenshot(page, "compare-chat-dark")


def test_a_second_generation_can_be_stopped(visit, text_run, tmp_path, monkeypatch):
    """The end of the first, which it replaces, does not hide the button."""
    step = EngineThread._step
    monkeypatch.setattr(EngineThread, "_step", lambda *args: time.sleep(0.02) or step(*args))
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    page = visit(tmp_path / "runs")
    show(page, "Generate")
    page.fill("#prompt", "the")
    page.fill("#tokens", "1000")
    page.locator("#generate-form details", has_text="Other samplers").locator("summary").click()
    page.fill("#other-samplers", "ban=[2]")  # the end of a text
    for _ in range(2):
        page.click("#generate-button")
        page.wait_for_function("() => document.getElementById('generated').textContent.length > 6")
    assert page.locator("#generate-stop").is_visible()
    page.click("#generate-stop")
    page.locator("#generate-stop").wait_for(state="hidden")
    assert page.get_attribute("#generated", "aria-busy") is None


def test_late_numbers_of_another_run_are_not_shown(visit, text_run, tmp_path):
    """Compare is pressed for another run before the first answer has come."""
    shutil.copytree(text_run, tmp_path / "runs" / "cats")
    shutil.copytree(text_run, tmp_path / "runs" / "old")
    page, held = visit(tmp_path / "runs"), []
    page.route("**/studio/runs/old", lambda route: held.append(route))
    show(page, "Compare")
    page.fill("#compare-tokens", "2")
    for run in ("old", "cats"):
        page.select_option("#compare-a", run)
        page.select_option("#compare-b", run)
        page.focus("#compare-prompt")
        page.keyboard.press("Enter")
        if run == "old":
            page.wait_for_function(
                "() => document.querySelectorAll('#compare-out .next h3').length > 1"
            )
    page.locator("#compare-out .numbers table").nth(1).wait_for()
    assert len(held) == 2
    wrong = {"metrics": {"wrong": 1}, "step": 1, "model": {}}
    for route in held:
        with contextlib.suppress(Exception):  # the page has cancelled it
            route.fulfill(json=wrong)
    page.evaluate("new Promise(resolve => setTimeout(resolve))")
    assert "wrong" not in page.inner_text("#compare-out")


def test_a_chosen_run_stays_chosen_when_others_appear(visit, text_run, tmp_path):
    runs = tmp_path / "runs"
    page = visit(runs)
    refresh = "import('/page/state.js').then(state => state.refreshRuns())"
    assert page.inner_text("#generate-run") == "no trained run yet"
    for name in ("first", "second"):
        shutil.copytree(text_run, runs / name)
        os.utime(runs / name / "config.json", ns=(len(name), len(name)))
    page.evaluate(refresh)
    show(page, "Train")
    page.get_by_role("button", name="Use first").click()
    page.locator("#panel-generate").wait_for()
    shutil.copytree(text_run, runs / "third")
    page.evaluate(refresh)
    assert page.input_value("#generate-run") == "first"
    assert page.input_value("#inside-run") == "third"  # the newest, where none was chosen
    assert page.locator("#generate-run option").count() == 3


def test_the_page_asks_for_the_key_until_it_is_right(browser, tmp_path):
    with serving([tmp_path / "runs"], create=create_studio, api_key="secret") as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.locator("#key-dialog[open]").wait_for()
        assert page.locator("#key-error").is_hidden()
        for wrong in ("wrong", "ключ"):  # the second cannot be sent in a header
            page.fill("#key", wrong)
            page.keyboard.press("Enter")
            page.locator("#key-error:visible", has_text="does not accept this API key").wait_for()
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready]")
        page.locator("#no-runs").wait_for()
        page.close()


def test_a_curve_with_a_loss_that_is_not_a_number(visit, text_run, tmp_path):
    run = tmp_path / "runs" / "cats"
    shutil.copytree(text_run, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": NaN}\n')
        file.write('{"step": 3, "validation": {"loss": Infinity, "perplexity": Infinity}}\n')
    (run / "evaluation.json").unlink()
    page = visit(tmp_path / "runs")
    page.get_by_role("button", name="Show cats").click()
    page.locator("#live-status", has_text="Trained for 3 steps").wait_for()
    assert "NaN" not in page.locator("#chart svg").inner_html()
    assert page.locator("#chart circle").count() == 2


@pytest.mark.long
def test_every_kind_of_model_in_every_panel(visit, text_run, pair_run, materials, tmp_path):  # noqa: F811
    """Odd texts are shown as text, or refused with a sentence; nothing runs and nothing breaks."""
    runs = tmp_path / "runs"
    shutil.copytree(text_run, runs / "cats")
    shutil.copytree(pair_run, runs / "pairs")
    for preset in ("lstm", "convolution", "ngram", "hmm"):
        small = [] if preset in ("ngram", "hmm") else ["model.dim=16", "train.steps=2"]
        trained(runs / preset, materials / "cats.txt", [f"model.preset={preset}", *small])
    page = visit(runs, refusals=True)
    for run in ("cats", "pairs", "lstm", "convolution", "ngram", "hmm"):
        for text in ODD_TEXTS:
            show(page, "Generate")
            page.select_option("#generate-run", run)
            page.fill("#prompt", text)
            answered(page, "table.stages, #distribution-error:visible")
            page.fill("#tokens", "5")
            page.click("#generate-button")
            page.locator("#generate-button:enabled").wait_for()
            answered(page, "#generated .prompt, #generate-error:visible")
            show(page, "Look inside")
            page.select_option("#inside-run", run)
            page.fill("#inside-text", text)
            page.click("#inside-button")
            answered(page, "#attention:visible, #attention-error:visible")
            answered(page, "#next-table table, #next-table .empty, #next-error:visible")
            assert page.title() == "Look inside – regard studio"
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        show(page, "Compare")
        page.select_option("#compare-b", run)
        page.fill("#compare-prompt", "the cat")
        page.keyboard.press("Enter")
        page.locator("#compare-out .numbers table").nth(1).wait_for()


@pytest.mark.long
def test_512_tokens_and_144_heads_are_shown(visit, materials, tmp_path):  # noqa: F811
    sizes = ["model.layers=12", "model.heads=12", "model.dim=48", "model.context=512"]
    words = [*sizes, "data.tokenizer=char", "train.steps=1", "train.batch=1"]
    trained(tmp_path / "runs" / "deep", materials / "cats.txt", words)
    page = visit(tmp_path / "runs")
    show(page, "Look inside")
    text = ("the 1th cat sat on the mat, " * 20)[:512]
    page.fill("#inside-text", text)
    started = time.monotonic()
    page.keyboard.press("Enter")
    frame = page.frame_locator("#attention")
    frame.get_by_role("button", name="head 11").last.click(timeout=120_000)
    frame.get_by_role("heading", name="decoder.blocks.11.attention, head 11").wait_for()
    print(f"144 heads of 512 tokens in {time.monotonic() - started:.0f} s", file=sys.stderr)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def answered(page, selector):
    page.locator(selector).first.wait_for(timeout=60_000)


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
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert page.evaluate(paint) < 2000  # milliseconds
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
    settings = "train.steps=800 model.layers=2 model.dim=64 train.evaluate_every=50"
    page.fill("#train-settings", settings)
    page.click("#train-button")
    page.locator("#live-step", has_text=re.compile("Step [1-9]")).wait_for(timeout=90_000)
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
