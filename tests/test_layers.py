"""The direction of imports, and what is never imported, read from the source itself."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent
MODULES = {
    ".".join(("regard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
LAYERS = [
    {"renamed"},
    {"errors", "html", "units"},
    {"config", "seeds"},
    {"files"},
    {"nn", "text"},
    {"models", "data"},
    {"accel"},
    {"hub"},
    {"tasks"},
    {"generate"},
    {"explain"},
    {"pipelines"},
    {"training"},
    {"api"},
    {"serve"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


@functools.cache
def tree(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module):
    """The full name of everything that a module imports, wherever in it the statement stands."""
    return [*_imports(module)]


def _imports(module):
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from regard.nn import attention` names a module, `from regard.errors import X` not
            yield from (
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
                for alias in node.names
            )


def part(name):
    """`nn` of `regard.nn.position`; nothing for what is not ours, or for the top itself."""
    names = name.split(".")
    return names[1] if names[0] == "regard" and len(names) > 1 else None


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def every_module(check):
    """A test that asks this of every module, and names those that fail."""

    @functools.wraps(check)
    def test():
        wrong = []
        for module in MODULES:
            try:
                check(module)
            except AssertionError as error:
                wrong.append(f"{module}: {error}")
        assert not wrong, "\n".join(wrong)

    del test.__wrapped__  # whose argument pytest would take for a fixture
    return test


def test_every_part_has_a_layer():
    parts = {part(module) for module in MODULES} - {None, "__main__"}
    assert parts <= set(LEVEL)


@every_module
def test_imports_point_one_way(module):
    own = part(module)
    if own in LEVEL:  # the package itself and __main__ stand above all
        wrong = [
            name
            for name in imports(module)
            if within(name, "regard") and part(name) != own and LEVEL[part(name)] >= LEVEL[own]
        ]
        assert not wrong


@every_module
def test_parts_that_must_not_know_each_other_do_not(module):
    for name in imports(module):
        if within(module, "regard.nn", "regard.accel"):
            known = {"torch", "jaxtyping", "regard", *sys.stdlib_module_names}
            known |= {"triton"} if within(module, "regard.accel.kernels") else set()
            assert name.split(".")[0] in known
        if within(module, "regard.nn"):
            assert not within(name, "regard.text")
        if within(module, "regard.models"):
            assert not within(name, "regard.text"), "a model never sees a tokenizer"
        if within(module, "regard.data"):
            assert not within(name, "regard.models"), "data never sees a model"
            assert not within(name, "regard.nn") or name == "regard.nn.state"
        if within(module, "regard.generate", "regard.explain"):
            assert not within(name, "regard.models") or name == "regard.models.base", (
                "they know the protocols, never a concrete model"
            )


COMMAND_LINE_IMPORTS = (
    "regard.api",  # everything a command does
    "regard.cli",
    "regard.config",  # parsing of `key=value`
    "regard.errors",
    "regard.html",
    "regard.files.atomic",  # writing of pictures and results
    "regard.serve",  # the server
)


@every_module
def test_the_command_line_calls_the_python_api_only(module):
    if within(module, "regard.cli"):
        wrong = [
            name
            for name in imports(module)
            if within(name, "regard") and not within(name, *COMMAND_LINE_IMPORTS)
        ]
        assert not wrong


@every_module
def test_readable_modules_have_no_branch_for_a_compiler_or_a_kernel(module):
    """Fast paths are attached by `accel`, from outside."""
    if not within(module, "regard.accel"):
        assert "is_compiling" not in MODULES[module].read_text(encoding="utf-8")
        assert not any(within(name, "triton") for name in imports(module))


@every_module
def test_nothing_that_runs_code_from_a_file_is_used(module):
    for name in imports(module):
        assert name.split(".")[0] not in {
            "pickle",
            "cPickle",
            "dill",
            "joblib",
            "shelve",
            "marshal",
        }
    source = MODULES[module].read_text(encoding="utf-8")
    for call in ("torch.load", "yaml.load", "allow_pickle=True"):
        assert call not in source


@every_module
def test_only_the_command_line_and_the_progress_display_print(module):
    if not within(module, "regard.cli", "regard.api.display"):
        printed = [
            node.lineno
            for node in ast.walk(tree(module))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
        assert not printed


HELP = """
import sys
from regard.cli import main
sys.argv = ["regard", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["generate", "--help"]])
def test_asking_for_help_does_not_wait_for_torch(words):
    done = subprocess.run(
        [sys.executable, "-c", HELP, *words], check=True, capture_output=True, text=True
    )
    assert "Usage" in done.stdout


def test_importing_the_package_does_not_wait_for_torch():
    code = "import regard, regard.config, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
