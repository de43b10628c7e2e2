"""The mutants of a module: cosmic-ray's operators, and statements left out. One per place and kind of change, because
ten replacements of one operator would weigh ten times what one missing call does."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

Place = tuple[int, int]
Span = tuple[Place, Place]
# Changes that say nothing: no handler of ours expects the made-up exception that this one puts in the place of each.
UNUSED = ("ExceptionReplacer", "RemoveDecorator", "VariableInserter", "VariableReplacer", "NoOp")
# Nobody writes these by mistake in the place of another operator; `is` for `==` is the same for most values.
UNLIKELY = {"Mod", "Pow", "RShift", "LShift", "BitOr", "BitAnd", "BitXor"}
IDENTITY = {"Is", "IsNot"}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    kind: str
    code: str
    diff: str

    @property
    def lines(self) -> tuple[str, str, str]:
        return lines_of(self.module, self.diff)


def lines_of(module: str, diff: str) -> tuple[str, str, str]:
    """As in targets.EQUIVALENT."""
    changed = diff.splitlines()[2:]
    before = " ".join(one[1:].strip() for one in changed if one.startswith("-"))
    after = " ".join(one[1:].strip() for one in changed if one.startswith("+"))
    return module, before, after


def mutants(module: str, code: str, chance: random.Random) -> list[Mutant]:
    """In random order."""
    found = [*_replaced(code, chance), *_left_out(code)]
    chance.shuffle(found)
    made = []
    for line, kind, changed in found:
        diff = "".join(
            difflib.unified_diff(code.splitlines(True), changed.splitlines(True), module, module, n=0, lineterm="\n")
        )
        made.append(Mutant(module, line, kind, changed, diff))
    return made


def _replaced(code: str, chance: random.Random) -> Iterator[tuple[int, str, str]]:
    silent = list(_silent(ast.parse(code)))
    at: dict[tuple[Place, str], list[tuple[str, int]]] = {}  # place and family -> operators and their occurrences
    nodes = list(ast_nodes(get_ast(code)))
    for name in plugins.operator_names():
        family = name.partition("/")[2].partition("_")[0]
        operator = plugins.get_operator(name)
        if family in UNUSED or _unlikely(name) or operator.arguments():
            continue
        positions = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start < last for first, last in silent):
                at.setdefault((start, family), []).append((name, occurrence))
    for (start, family), ways in at.items():
        name, occurrence = chance.choice(ways)
        changed = mutate_code(code, plugins.get_operator(name)(), occurrence)
        if changed and changed != code:
            yield start[0], family, changed


def _unlikely(name: str) -> bool:
    _, *words = name.split("_")
    return words[-1:] != [] and (words[-1] in UNLIKELY or (words[0] in IDENTITY) != (words[-1] in IDENTITY))


def _silent(tree: ast.Module) -> Iterator[Span]:
    """Where a change means nothing or is no promise: annotations, which are never evaluated, what only a type checker
    reads (a frozen dataclass among it), and constants of a module, whose exact numbers are chosen and not promised."""
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            found += node.decorator_list
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.append(node)
        for one in found:
            if one is not None:
                yield _span(one)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield _span(node)


def _span(node: ast.AST) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _left_out(code: str) -> Iterator[tuple[int, str, str]]:
    """Calls, deletions, raises and changes of a state that are not done."""
    lines = code.splitlines(True)
    for node in ast.walk(ast.parse(code)):
        if not _leaves(node):
            continue
        (first, column), (last, end) = _span(node)
        changed = [*lines[: first - 1], lines[first - 1][:column] + "pass" + lines[last - 1][end:], *lines[last:]]
        yield first, "LeftOut", "".join(changed)


def _leaves(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Call) and not _says(call)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise)


def _says(call: ast.Call) -> bool:
    """Whether it only writes to the log."""
    function = call.func
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "log"


def read(root: Path, module: str) -> str:
    return (root / module).read_text(encoding="utf-8")
