"""The rules of the architecture: who imports whom, where torch is, how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tightfit"
FILES = sorted(SOURCE.rglob("*.py"))

FOUNDATION = {"units", "errors", "progress", "files", "__version__"}
"""What every package may import: they import nothing of tightfit but each other."""

MAY_IMPORT: dict[str, set[str]] = {
    "units": set(),
    "errors": set(),
    "progress": set(),
    "files": set(),
    "graph": set(),
    "plan": {"graph"},
    "eviction": set(),
    "planners": {"graph", "plan", "eviction", "_core"},
    "arena": {"plan", "_core"},
    "costs": {"graph"},
    "allocator": set(),
    "capture": {"graph", "plan", "costs"},
    "alternatives": {"graph", "capture"},
    "execution": {"graph", "plan", "capture", "alternatives", "arena", "allocator"},
    "online": {"eviction", "allocator", "plan"},
    "reporting": {"graph", "plan", "arena"},
    "zoo": set(),
    "_core": set(),
}
"""Each package's row in the design; `api` and `cli` may import every package."""

COMPOSITIONS = {"__main__", "api", "cli"}
TORCH_PACKAGES = {
    "allocator",
    "api",
    "capture",
    "alternatives",
    "execution",
    "online",
    "zoo",
}
TORCH_FILES = {"costs/measured.py", "costs/this_cpu.py"}

LONGEST_FILE = 400
LONGER_FILES = {"planners/problem.py": 450}
"""Files that may be longer, with their own limits: what they hold belongs together."""
LONGEST_BODY = 60
"""Lines of a function without its signature and docstring."""


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every absolute import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_table(path: Path) -> None:
    package = package_of(path)
    if package == "__init__" or package in COMPOSITIONS:
        return
    allowed = MAY_IMPORT[package] | FOUNDATION | {package}
    for line, name in imported(ast.parse(path.read_text("utf-8"))):
        parts = name.split(".")
        if parts[0] != "tightfit" or len(parts) == 1:
            continue
        assert parts[1] in allowed, f"{path}:{line}: {package} may not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_torch_is_imported_only_where_it_belongs(path: Path) -> None:
    if package_of(path) in TORCH_PACKAGES or str(path.relative_to(SOURCE)) in TORCH_FILES:
        return
    for line, name in imported(ast.parse(path.read_text("utf-8"))):
        assert name.split(".")[0] not in ("torch", "torchvision"), f"{path}:{line} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text("utf-8")
    lines, limit = text.count("\n"), LONGER_FILES.get(str(path.relative_to(SOURCE)), LONGEST_FILE)
    assert lines <= limit, f"{path} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= LONGEST_BODY, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_every_package_has_a_row() -> None:
    packages = {package_of(path) for path in FILES} - {"__init__"}
    assert packages <= MAY_IMPORT.keys() | COMPOSITIONS


def test_importing_the_torch_free_half_never_imports_torch() -> None:
    modules = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if package_of(path) not in TORCH_PACKAGES | COMPOSITIONS
        and str(path.relative_to(SOURCE)) not in TORCH_FILES
    ]
    code = "import sys, importlib\nsys.modules['torch'] = None\n" + "\n".join(
        f"importlib.import_module({name!r})" for name in ["tightfit", "tightfit.cli.app", *modules]
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_tightfit_does_no_work() -> None:
    code = (
        "import sys, tightfit\n"
        "heavy = {'torch', 'numpy', 'highspy', 'msgspec', 'rich', 'cyclopts'}\n"
        "assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
