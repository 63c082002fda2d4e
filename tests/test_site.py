"""The documentation as a site: it builds without a warning, is complete, and loads nothing."""

import os
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

import regard
from regard.models.build import FAMILIES

ROOT = Path(__file__).parents[1]
PACKAGES = ("regard", "generate", "explain", "text", "tasks", "hub", "pipelines")
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
# Named in the theme's script, and requested only for a diagram or a repository, which we have not.
UNUSED = {"api.github.com", "unpkg.com"}
CREDITS = {"clipboardjs.com", "lunrjs.com", "tartarus.org", "bit.ly", "fontawesome.com"}
CREDITS |= {"www.w3.org"}
OF_THE_BROWSER = (".google.com", ".googleapis.com", ".gvt1.com")  # its accounts, clock and updates


class Resources(HTMLParser):
    """Collects what a page loads, as opposed to what it links to."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "link" and attributes.get("rel") == "canonical":
            return
        if attributes.get(LOADING.get(tag)):
            self.loaded.append(attributes[LOADING[tag]])


def build(folder):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not built.returncode, built.stderr


def documented(folder):
    """The Python names that the reference has, from the inventory that MkDocs writes."""
    lines = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(lines).decode().splitlines()}


def outside(folder):
    """The addresses outside the site that its pages, styles and scripts load or name."""
    for path in folder.rglob("*.html"):
        page = Resources()
        page.feed(path.read_text(encoding="utf-8"))
        yield from (url for url in page.loaded if re.match(r"(https?:)?//", url))
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8")
    for path in folder.rglob("*.css"):
        yield from re.findall(
            r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8")
        )
    scripts = folder / "assets" / "javascripts"
    for path in [*scripts.glob("*.js"), *scripts.glob("workers/*.js")]:
        hosts = re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8"))
        yield from set(hosts) - UNUSED - CREDITS


def test_the_site_builds_strictly_is_complete_and_loads_nothing_from_outside(tmp_path):
    build(tmp_path)
    assert list(outside(tmp_path)) == []
    names = documented(tmp_path)
    for package in PACKAGES:
        module = regard if package == "regard" else import_module(f"regard.{package}")
        public = {f"{module.__name__}.{name}" for name in module.__all__}
        assert public - names == set()
    for name in dir(regard.Run):
        assert name.startswith("_") or f"regard.Run.{name}" in names, name
    commands = (tmp_path / "commands.html").read_text(encoding="utf-8")
    assert "Usage: regard train" in commands
    index = (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "Kneser" in index


def test_the_index_by_lecture_topic_has_every_topic_that_is_in_the_library():
    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    counts = {"A": 6, "B": 11, "C": 5, "D": 12, "E": 3}
    for part, count in counts.items():
        numbers = [int(number) for number in re.findall(rf"^\| {part}(\d+) \|", text, re.MULTILINE)]
        assert numbers == list(range(1, count + 1)), part


def test_the_index_by_model_has_every_family():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [family for family in FAMILIES if f"| `{family}` |" not in text] == []


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_requests_nothing_from_outside(tmp_path):
    build(tmp_path / "site")
    for page in ("index.html", "tutorials/attention.html", "reference/nn.html"):
        log = tmp_path / "net.json"
        address = (tmp_path / "site" / page).as_uri()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-background-networking"]
        command += [f"--log-net-log={log}", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=3000", "--dump-dom", address]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "<title>" in shown.stdout
        hosts = set(re.findall(r'"url":"https?://([^/"]+)', log.read_text(encoding="utf-8")))
        assert [host for host in hosts if not host.endswith(OF_THE_BROWSER)] == [], page


@pytest.mark.long
def test_the_picture_of_the_readme_is_what_explain_draws_after_the_quickstart(tmp_path):
    run = regard.train("quickstart", out=tmp_path / "run", quiet=True)
    ((path, attention),) = run.explain("seven hundred ninety-nine").items()
    top_two = {
        word: {attention.columns[place] for place in row.topk(2).indices.tolist()}
        for word, row in zip(attention.rows, attention.mean(), strict=True)
    }
    assert "ninety" in top_two["quatre"] & top_two["vingt"] & top_two["dix"]
    assert "nine" in top_two["dix"] & top_two["neuf"]
    attention.save(tmp_path / "drawn.svg", title=path)
    drawn, shown = tmp_path / "drawn.svg", ROOT / "docs" / "images" / "alignment.svg"
    texts = [re.findall(r">([^<>]+)</text>", each.read_text("utf-8")) for each in (drawn, shown)]
    assert texts[0] == texts[1] != [], "run `make images`"
