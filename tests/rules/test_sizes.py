"""Product code stays in pieces that can be read at once."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("cli", "cluster", "demo", "engine", "kvtransfer", "planner", "services", "tandem")
GENERATED = "tandem/v1/"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_MODULES = 400, 60, 7, 14


def modules() -> list[str]:
    names = subprocess.run(["git", "ls-files", *PRODUCT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.splitlines() if name.endswith(".py") and not name.startswith(GENERATED)]


def too_large(source: str) -> list[str]:
    """What exceeds a bound in the source of one module."""
    found = [f"{len(lines)} lines"] if len(lines := source.splitlines()) > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Triton's kernels have no objects, so a parameter for each stride: their signatures do not count.
            start = node.body[0].lineno if _is_kernel(node) else node.lineno
            lines_of = (node.end_lineno or node.lineno) - start + 1
            if lines_of > MAX_FUNCTION_LINES:
                found.append(f"{node.name}: {lines_of} lines")
            parameters = len(node.args.args) - 1 + len(node.args.kwonlyargs)
            if node.name == "__init__" and parameters > MAX_PARAMETERS:
                found.append(f"line {node.lineno}: a constructor with {parameters} parameters")
    return found


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def test_files_functions_and_constructors_are_small() -> None:
    """Without generated code."""
    found = {name: too_large((ROOT / name).read_text()) for name in modules()}
    assert {name: sizes for name, sizes in found.items() if sizes} == {}


def test_no_folder_has_too_many_modules() -> None:
    """A folder is a station on the path of a request, not a heap."""
    folders = Counter(Path(name).parent for name in modules() if not name.endswith("__init__.py"))
    assert {str(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_control_each_bound_is_checked() -> None:
    """One more than each."""
    wide = ", ".join(f"p{number}" for number in range(MAX_PARAMETERS + 1))
    assert too_large(f"class A:\n    def __init__(self, {wide}): ...\n") != []
    assert too_large("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES) != []
    assert too_large("\n" * (MAX_FILE_LINES + 1)) != []
    assert too_large("class A:\n    def __init__(self, a): ...\n") == []
