"""The documents against the code: blocks run, commands parse, and what is named exists."""

import doctest
import importlib
import itertools
import re
import shlex
import sys
import tomllib
import types
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

import regard
from regard.cli import app, main
from regard.config import DataConfig, RunConfig, TrainConfig, build, kind_of, make, study_runs
from regard.data.builtin import BUILTINS
from regard.explain.figures import FIGURES
from regard.generate import SAMPLERS
from regard.models.build import (
    FAMILIES,
    count_parameters,
    family_of,
    is_fitted_without_gradients,
    resolve,
)
from regard.models.presets import PRESETS
from regard.nn.block import FFNS
from regard.nn.norm import NORMS
from regard.nn.position import POSITIONS
from regard.nn.recurrent import CELLS
from regard.nn.score import SCORES
from regard.pipelines import PIPELINES
from regard.tasks import TASKS
from regard.text import TOKENIZERS
from regard.training.optim import OPTIMIZERS, SCHEDULES, schedule
from regard.training.setup.configure import configure, configure_study, recipes
from regard.training.tracking.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(regard.__file__).parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = [path for path in DOCUMENTS if path.parent.name != "tutorials"]  # test_tutorials runs those
TABLES = [SCORES, POSITIONS, NORMS, FFNS, SAMPLERS, PRESETS, TASKS]
TABLES += [SCHEDULES, OPTIMIZERS, TOKENIZERS, BUILTINS, FAMILIES, CELLS, PIPELINES, TRACKERS]
ELSEWHERE = {"curl", "pip", "git", "cd"}  # programs that are not ours to check


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins at, and what stands before it."""

    language: str
    text: str
    line: int
    before: str

    def answers(self, other):
        """Whether it shows what the block before it prints."""
        return other is not None and self.language == "text" and not self.before.strip()


def blocks(path):
    text, end = path.read_text(encoding="utf-8"), 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(match[1], match[2], line, text[end : match.start()])
        end = match.end()


def prose(path):
    """A document without its blocks."""
    return re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def spans(path):
    return re.findall(r"`([^`\n]+)`", prose(path))


def same(shown, printed):
    """Equal text; a line of `…` stands for any lines."""
    shown = re.sub(r"^…$", "...", shown, flags=re.MULTILINE)
    checker = doctest.OutputChecker()
    trimmed = (
        "\n".join(map(str.rstrip, each.strip("\n").split("\n"))) for each in (shown, printed)
    )
    return checker.check_output(*(f"{each}\n" for each in trimmed), doctest.ELLIPSIS)


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=[path.name for path in paths])


@by_name([path for path in PAGES if any(b.language == "python" for b in blocks(path))])
def test_python_blocks_run_and_print_what_is_shown(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for backend in ("cuda", "backends.mps"):  # small models are quickest where nothing is compiled
        monkeypatch.setattr(f"torch.{backend}.is_available", lambda: False)
    module = types.ModuleType(path.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = None
    with ExitStack() as stack:
        for table in TABLES:  # a document may add to them, but not for the tests after it
            stack.enter_context(patch.dict(table))
        for block in blocks(path):
            if block.answers(asked):
                printed = capsys.readouterr().out
                assert same(block.text, printed), f"{path.name}:{block.line} printed\n{printed}"
            asked = None
            if block.language == "python" and ">>> " in block.text:
                run_examples(block, path, module)
            elif block.language == "python":
                capsys.readouterr()
                code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
                exec(code, module.__dict__)
                asked = block


def run_examples(block, path, module):
    examples = doctest.DocTestParser().get_doctest(
        block.text, {}, path.name, str(path), block.line - 1
    )
    examples.globs = module.__dict__
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(examples, out=said.append, clear_globs=False).failed:
        pytest.fail("".join(said), pytrace=False)


@dataclass(frozen=True)
class Command:
    """A command as a document shows it, and what it shows as its answer."""

    place: str
    words: tuple[str, ...]
    shown: str = ""


def commands():
    for path in DOCUMENTS:
        for block in blocks(path):
            if block.language == "console":
                for match in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
                    line = block.line + block.text.count("\n", 0, match.start())
                    yield command(f"{path.name}:{line}", match[1], match[2])
        for number, span in enumerate(spans(path)):
            if re.match(r"regard [a-z-]", span):
                yield command(f"{path.name}, span {number}", span)


def command(place, line, shown=""):
    words = shlex.split(line, comments=True)
    settings = itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words)
    return Command(place, tuple(words[len(list(settings)) :]), shown)


def each(chosen):
    return pytest.mark.parametrize("command", chosen, ids=[each.place for each in chosen])


COMMANDS = list(commands())


def is_quick(command):
    """Whether a command can be run here: it needs no run and trains nothing."""
    program, *words = command.words
    if program != "regard":
        return False
    known = {*PRESETS, *recipes()}
    return (
        not words
        or "--help" in words
        or (words[0] in ("info", "plan") and words[1:2] and words[1] in known)
    )


@each(COMMANDS)
def test_every_command_that_is_shown_exists_and_takes_these_options(command):
    program, *words = command.words
    if program == "regard":
        parse(words)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "torchrun":
        start = words.index("-m")
        assert words[start + 1] == "regard"
        parse(words[start + 2 :])
    elif program == "python" and words[0] != "-m":
        assert (ROOT / words[0]).is_file()
    elif program == "python":
        assert words[1] in {"venv", "pip", "regard"}
    else:
        assert program in ELSEWHERE or (ROOT / program).exists() or program.startswith(".venv/bin/")


def parse(words):
    if not words or "--help" in words or words == ["--version"]:
        return
    name, *rest = words
    known = typer.main.get_command(app).commands
    assert name in known
    if not rest:  # the name itself is spoken of
        return
    given = known[name].make_context(name, rest).params
    overrides = list(given.get("overrides") or [])
    if name == "train" and "=" in given["data_or_recipe"]:
        overrides.append(given["data_or_recipe"])
    for override in overrides:
        assert is_key(override.partition("=")[0]), override


def is_key(key):
    """Whether a dotted key is a setting of a run."""
    part, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if part in ("data", "train"):
        return name in names_of(DataConfig if part == "data" else TrainConfig)
    if part == "model":
        known = (names_of(config) for config, _ in FAMILIES.values())
        return name in {"preset", "family"}.union(*known)
    return part == "minutes" or part in names_of(RunConfig)


def names_of(config):
    return {each.name for each in fields(config)}


@each([each for each in COMMANDS if is_quick(each)])
def test_quick_commands_run_and_print_what_is_shown(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit:
        main(command.words[1:])
    printed = capsys.readouterr().out
    assert not exit.value.code
    assert not command.shown or same(command.shown, printed), printed


@by_name(DOCUMENTS)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file) if file else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def anchors(path):
    """The headings of a document as links name them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@by_name(DOCUMENTS)
def test_files_that_are_named_exist(path):
    for span in spans(path):
        is_path = re.fullmatch(r"[\w./{},-]+(\.py|\.md|\.toml|/)", span)
        if is_path and not span.startswith(("runs/", "checkpoints/", "my.")):
            for name in unfold(span):
                bases = (path.parent, ROOT, PACKAGE)
                found = any((base / name).exists() for base in bases)
                assert found or ("/" not in name and any(ROOT.glob(f"*/**/{name}"))), span


def unfold(name):
    """`data/{text,pairs}.py` as the names it stands for."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [match[1] + part + match[3] for part in match[2].split(",")] if match else [name]


@by_name(DOCUMENTS)
def test_names_of_the_code_that_are_named_exist(path):
    parts = {each.stem for each in PACKAGE.iterdir() if each.stem[0] not in "_."} - {"py"}
    for span in spans(path):
        dotted = re.fullmatch(r"(?:regard\.)?((\w+)(?:\.\w+)+)(?:\(.*\))?", span)
        is_file = re.search(r"\.(py|md|toml|json|jsonl|txt|safetensors)$", span)
        if dotted and dotted[2] in parts and not is_file and not is_key(dotted[1]):
            assert exists(f"regard.{dotted[1]}"), span


def exists(name):
    """Whether a dotted name leads to a module or to something in one, fields included."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if part in getattr(found, "__dataclass_fields__", {}):
                return part == parts[-1]
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@by_name([path for path in DOCUMENTS if any(b.language == "toml" for b in blocks(path))])
def test_recipes_that_are_shown_can_be_read(path):
    for block in blocks(path):
        if block.language == "toml":
            recipe = {"name": "shown", **tomllib.loads(block.text)}
            for run in study_runs(recipe).values() or [recipe]:
                assert build(RunConfig, run)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads_and_describes_a_model(name, monkeypatch, tmp_path):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    runs = configure_study(name) or {name: configure(name)}
    for run, config in runs.items():
        assert config.name == run
        model = resolve(config.model, vocab_size=100)
        assert is_fitted_without_gradients(family_of(model)) or count_parameters(model) > 0
        assert schedule(config.train.schedule, config.train.steps)(0) > 0
        assert make(config.task, TASKS, "task")
        assert kind_of(config.train.optimizer)[0] in OPTIMIZERS
        assert kind_of(config.data.tokenizer)[0] in TOKENIZERS


def test_the_page_of_models_has_every_recipe():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in recipes() if f"| `{name}` |" not in text] == []


def test_every_public_name_exists():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] in ("__main__", "fused") or "kernels" in parts:  # some need triton
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
        assert not missing, module.__name__


def test_the_axes_in_signatures_are_words_of_the_glossary():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = glossary.partition("| axis |")[2]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert [name for name in names if names.count(name) > 1] == []
    known = set(names)
    parts = ("nn", "models", "generate", "explain")
    for path in (path for part in parts for path in sorted((PACKAGE / part).rglob("*.py"))):
        for shape in re.findall(r'Tensor, "([^"]*)"\]', path.read_text(encoding="utf-8")):
            axes = {axis.strip("#*") for axis in shape.split()}
            assert {axis for axis in axes if not axis.isdigit()} <= known, f"{path}: {shape}"


def test_the_page_of_figures_has_every_figure_and_its_picture():
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    for name in FIGURES:
        assert f"\n## {name}\n" in text, "run `make figures`"
        assert f"$ regard show {name}" in text
        (picture,) = (ROOT / "docs" / "images" / "figures").glob(f"{name}.*")
        assert picture.stat().st_size <= 60_000
