"""The documents say what the code is: settings, commands, paths, targets, errors. What drifts fails here."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cli.main import app
from tandem import errors
from tandem.errors import TandemError
from tandem.settings import Settings

ROOT = Path(__file__).parents[2]
README, OPERATIONS, DESIGN = ROOT / "README.md", ROOT / "docs/operations.md", ROOT / "docs/design.md"
CONTRIBUTING, PERFORMANCE = ROOT / "CONTRIBUTING.md", ROOT / "docs/performance.md"
LAB_NOTES = sorted((ROOT / "docs/lab-notes").glob("*.md"))
DOCUMENTS = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *LAB_NOTES,
    ROOT / "docs/runbooks/README.md",
)

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
SETTING_ROW = re.compile(r"^\| `(\w+)` \| (?:`--([\w-]+)`)? *\| (.*?) \| ", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
# First parts of the paths that are ours, and endings of files at the root.
TOPS = (
    *("proto", "cli", "tandem", "services", "engine", "kvtransfer", "cluster", "planner", "loadtest"),
    *("demo", "deploy", "docs", "tests"),
)
PATH = re.compile(rf"(?:(?:{'|'.join(TOPS)})/[\w./-]*|[\w-]+\.(?:md|toml|lock)|Makefile)")


def names(document: Path) -> list[str]:
    """What stands in single backticks, outside of fenced blocks."""
    return CODE.findall(FENCE.sub("", document.read_text(encoding="utf-8")))


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def classes(cls: type[TandemError]) -> Iterator[type[TandemError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from classes(child)


@functools.cache
def commands() -> dict[str, set[str]]:
    """Each command's options without the dashes."""
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {option.removeprefix("--") for one in command.params for option in one.opts if option.startswith("--")}
        for name, command in found.items()
    }


def test_every_setting_is_in_the_table_and_nothing_else() -> None:
    """The table of settings has each setting once, with its default, and none that is gone."""
    rows = SETTING_ROW.findall(OPERATIONS.read_text(encoding="utf-8").partition("## Settings")[2])
    assert [name for name, _, _ in rows] == list(Settings.model_fields)
    for name, option, default in rows:
        field = Settings.model_fields[name]
        plain = "(required)" if name == "model" else "(none)" if field.default is None else f"`{field.default}`"
        assert default == plain, name
        assert option in ("", name.replace("_", "-")), name
        assert bool(option) == (name.replace("_", "-") in commands()["up"]), f"{name} as an option of `tandem up`"


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_and_option_is_documented(command: str) -> None:
    """A user finds each command and each of its options in the README or in the operations manual."""
    text = README.read_text(encoding="utf-8") + OPERATIONS.read_text(encoding="utf-8")
    assert f"tandem {command}" in text
    assert commands()[command] <= set(OPTION.findall(text))


def test_an_adapter_is_loaded_by_its_path_within_the_root() -> None:
    """The path is relative to adapter_root, not to the folder of the shell."""
    text = OPERATIONS.read_text(encoding="utf-8")
    [root] = re.findall(r"tandem up .*--adapter-root (\S+)", text)
    assert re.findall(r"tandem adapters load \S+ (\S+)", text)
    assert not re.search(rf"tandem adapters load \S+ {root}/", text)


def test_no_option_is_made_up() -> None:
    """An option that a document shows for a `tandem` command line is one of that command's."""
    for document in DOCUMENTS:
        for command, rest in re.findall(r"tandem (\w+)([^\n`|]*)", document.read_text(encoding="utf-8")):
            if command in commands():
                assert set(OPTION.findall(rest)) <= commands()[command] | {"help"}, f"{document.name}: {command}{rest}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_exists(document: Path) -> None:
    """A file or folder that is named is there."""
    paths = {name for name in names(document) if PATH.fullmatch(name)}
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    """A relative link leads to a file, and a link with an anchor to a heading of that file."""
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_every_make_target_exists_and_is_explained() -> None:
    """`make x` in a document is a target of the Makefile, and CONTRIBUTING.md explains each target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    mentioned = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|^    )make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert mentioned <= targets
    assert targets <= set(re.findall(r"`make ([a-z-]+)`", CONTRIBUTING.read_text(encoding="utf-8")))


def test_the_error_tree_is_the_one_in_the_code() -> None:
    """The drawn tree has every class with its status and HTTP code, and no other; its module draws the same."""
    rows = re.compile(r"^    [│├└─ ]*(\w+)(?: +([A-Z_]{4,}) +(\d{3}))?", re.MULTILINE)
    for text in (
        DESIGN.read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0],
        errors.__doc__ or "",
    ):
        drawn = {name: (status, http) for name, status, http in rows.findall(text)}
        assert set(drawn) == {cls.__name__ for cls in classes(TandemError)}
        for cls in classes(TandemError):
            status, http = drawn[cls.__name__]
            assert not status or (status, int(http)) == (cls.status, cls.http), cls.__name__


def test_the_registrys_keys_are_the_ones_in_the_code() -> None:
    """The keys that the design names are those that the registry's own module names."""
    key = re.compile(r"tandem:\{<cluster>\}:[\w:<>]+")
    in_code = set(key.findall((ROOT / "cluster/state/registry.py").read_text(encoding="utf-8")))
    assert set(key.findall(DESIGN.read_text(encoding="utf-8"))) == in_code


def test_every_function_of_the_path_exists() -> None:
    """The walk through a request names functions and classes that are in the file beside them."""
    steps = DESIGN.read_text(encoding="utf-8").partition("| step |")[2].partition("\n\n")[0]
    pairs = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", steps)
    assert len(pairs) > 10
    for path, name in pairs:
        defined = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert set(name.split(".")) <= defined, f"{path}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_examples_name_what_there_is(document: Path) -> None:
    """Examples in Python parse, and what they import from us can be imported."""
    for source in re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tandem":
                module = __import__(node.module, fromlist=[alias.name for alias in node.names])
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_every_test_of_ours_says_what_it_promises() -> None:
    """Each test function has a docstring that is a sentence."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                said = (ast.get_docstring(node) or "").strip()
                if not re.match(r"^\S.*[.?!:)]$", said, re.DOTALL):
                    silent.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not silent


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_somebodys_machine(document: Path) -> None:
    """Documents hold no home directory, no checkout and no work directory of whoever wrote them."""
    assert not re.findall(r"(?:/home|/root|/work|/Users)/\S*", document.read_text(encoding="utf-8"))


# Sections whose tables are of machines or of arithmetic, not of measurements.
NO_PROCESSOR = {"Machines", "The floors by arithmetic"}


def unnamed(text: str) -> list[str]:
    """Sections with a table of numbers that do not name the processor on which they were measured."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return [
        title
        for title, body in zip(sections[1::2], sections[2::2], strict=True)
        if title not in NO_PROCESSOR and re.search(r"^\|.*\d.*\|$", body, re.MULTILINE)
        if not re.search(r"Zen \d|Xeon|NVIDIA [A-Z]\d", body)
    ]


@pytest.mark.parametrize("document", [PERFORMANCE, *LAB_NOTES], ids=lambda path: path.name)
def test_every_table_of_numbers_is_of_a_named_processor(document: Path) -> None:
    """A result holds for one kind of processor, so each section with results names it."""
    assert unnamed(document.read_text(encoding="utf-8")) == []


def test_a_section_without_a_processor_is_found() -> None:
    """The check fails for a section whose processor is not named."""
    text = "## Results\n\nProcessor: AMD EPYC, Zen 4.\n\n| 1 |\n"
    assert unnamed(text) == []
    assert unnamed(text.replace("Zen 4", "")) == ["Results"]
