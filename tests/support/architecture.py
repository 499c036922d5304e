"""Facts about the structure of the package, read from its syntax trees: nothing is imported.

``python tests/support/architecture.py [SOURCE]`` prints the figures of any checkout.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tightfit"

SPECIAL = ("__init__", "__main__")


@dataclass(frozen=True)
class File:
    """One Python file of the package.

    Parameters
    ----------
    path, source : Path
        The file, and the package's folder.
    """

    path: Path
    source: Path

    @property
    def place(self) -> str:
        """Its path inside the package."""
        return self.path.relative_to(self.source).as_posix()

    @property
    def module(self) -> str:
        """Its dotted name, as others import it."""
        parts = self.path.relative_to(self.source.parent).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """Line and dotted name of every import: late ones and those for annotations too."""
        found: list[tuple[int, str]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        return tuple(found)

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def files_of(source: Path = SOURCE) -> tuple[File, ...]:
    """Return every Python file of a package."""
    return tuple(File(path, source) for path in sorted(source.rglob("*.py")))


# -- imports -----------------------------------------------------------------------------------


def arrows_of(files: tuple[File, ...]) -> dict[str, set[str]]:
    """Return which files each file imports, by their places; a package's own names are its file."""
    by_module = {file.module: file.place for file in files}
    arrows: dict[str, set[str]] = {}
    for file in files:
        targets = (_home(name, by_module) for _, name in file.imports)
        arrows[file.place] = {t for t in targets if t is not None and t != file.place}
    return arrows


def _home(name: str, by_module: dict[str, str]) -> str | None:
    """Return the file an imported name comes from; None for other packages."""
    while name not in by_module:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return by_module[name]


def circles_of(files: tuple[File, ...]) -> list[tuple[str, ...]]:
    """Return the circles of files that import one another; the package's face is left out.

    The face hands names out lazily: what it imports is for annotations, and others read no more
    than the version from it.
    """
    arrows = arrows_of(files)
    arrows.pop("__init__.py", None)
    reached = {place: _reached_from(place, arrows) for place in arrows}
    circles: dict[tuple[str, ...], None] = {}
    for place in arrows:
        circle = tuple(sorted(o for o in reached[place] if place in reached.get(o, ())))
        if circle:
            circles[circle] = None
    return list(circles)


def _reached_from(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    front = [start]
    while front:
        new = arrows.get(front.pop(), set()) - seen
        seen |= new
        front += new
    return seen


# -- who changes what --------------------------------------------------------------------------


def foreign_writes(file: File) -> list[tuple[int, str]]:
    """Return line and text of every change to an attribute of another object.

    What a function made itself, by calling something, is its own; so are `self` and `cls`.
    """
    found: list[tuple[int, str]] = []
    for function in (*file.functions, file.tree):
        own = _made_in(function) | {"self", "cls"}
        for node in _inside(function):
            for target in _targets(node):
                owner = _changed_owner(target)
                if owner is not None and _root(owner) not in own:
                    found.append((target.lineno, ast.unparse(target)))
    return sorted(set(found))


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, but not those of functions and classes inside it."""
    front = list(ast.iter_child_nodes(function))
    while front:
        node = front.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            front += ast.iter_child_nodes(node)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return list(node.targets)
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _changed_owner(target: ast.expr) -> ast.expr | None:
    """Return the object whose attribute a target changes; an item of an attribute is one too."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.value if isinstance(target, ast.Attribute) else None


def _root(owner: ast.expr) -> str:
    while isinstance(owner, ast.Attribute | ast.Subscript):
        owner = owner.value
    return owner.id if isinstance(owner, ast.Name) else ""


def _made_in(function: ast.AST) -> set[str]:
    """Return the names a function gives to what it makes: functions, results of calls, literals."""
    made: set[str] = {"sys"}  # the interpreter's own tables belong to everybody
    literals = ast.Call | ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    for node in _inside(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, literals):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made |= {target.id for target in targets if isinstance(target, ast.Name)}
    return made


OTHERS_PRIVATES = {
    "_backward_hooks",
    "_buffers",
    "_cdata",
    "_compiled_call_impl",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_indices",
    "_is_view",
    "_modules",
    "_non_persistent_buffers_set",
    "_orig_mod",
    "_overloadpacket",
    "_parameters",
    "_replace",
    "_schema",
    "_values",
    "_version",
}
"""Private names of PyTorch's and Python's objects for which there is no public way."""


def foreign_privates(file: File) -> list[tuple[int, str]]:
    """Return line and text of every private attribute that is read from another file's object.

    The operators of PyTorch (`aten`) have names of their own, private or not.
    """
    own = _defined_privates(file.tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_dunder = node.attr.startswith("__") and node.attr.endswith("__")
        holder = node.value.id if isinstance(node.value, ast.Name) else ""
        if is_dunder or holder in ("self", "cls", "aten") or node.attr in own | OTHERS_PRIVATES:
            continue
        found.append((node.lineno, ast.unparse(node)))
    return found


def _defined_privates(tree: ast.AST) -> set[str]:
    """Return the private names that a file gives to its own functions, classes and attributes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own


def private_torch_imports(file: File) -> list[tuple[int, str]]:
    """Return line and name of every private name of PyTorch that a file imports or spells out."""
    found = [
        (line, name)
        for line, name in file.imports
        if name.split(".")[0] == "torch" and any(map(_is_private, name.split(".")))
    ]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            text = ast.unparse(node)
            if text.startswith("torch."):
                found.append((node.lineno, text))
    return sorted(set(found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# -- values and sizes --------------------------------------------------------------------------

MOST_PARAMETERS = 6

MUTABLE = {"list", "dict", "set", "List", "Dict", "Set", "Counter", "defaultdict", "deque"}


def changeable_fields(file: File) -> list[tuple[int, str]]:
    """Return line and name of every list, dict or set in a frozen dataclass."""
    found: list[tuple[int, str]] = []
    for node in file.classes:
        if not any("frozen=True" in ast.unparse(d) for d in node.decorator_list):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                names = {n.id for n in ast.walk(field.annotation) if isinstance(n, ast.Name)}
                if names & MUTABLE:
                    found.append((field.lineno, f"{node.name}.{ast.unparse(field.target)}"))
    return found


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    assert node.end_lineno is not None
    return node.end_lineno - body[0].lineno + 1 if body else 0


def wide_signatures(file: File) -> list[tuple[int, str]]:
    """Return line and name of every function of more than six parameters, or more than one bool."""
    found: list[tuple[int, str]] = []
    for node in file.functions:
        every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        given = [a for a in every if a.arg not in ("self", "cls")]
        bools = [a for a in given if a.annotation and ast.unparse(a.annotation) == "bool"]
        if len(given) > MOST_PARAMETERS or len(bools) > 1:
            found.append((node.lineno, node.name))
    return found


def folders_of(files: tuple[File, ...]) -> dict[str, int]:
    """Return how many files lie in each folder; what opens a folder does not count."""
    counts: dict[str, int] = {}
    for file in files:
        folder, _, name = file.place.rpartition("/")
        if name.removesuffix(".py") not in SPECIAL:
            counts[folder or "."] = counts.get(folder or ".", 0) + 1
    return counts


def figures(files: tuple[File, ...]) -> dict[str, int]:
    """Return the numbers by which one structure is compared with another."""
    circles = circles_of(files)
    face = [file for file in files if file.place.startswith("api/")]
    return {
        "files": len(files),
        "circles": len(circles),
        "files in circles": sum(map(len, circles)),
        "largest flat folder": max(folders_of(files).values()),
        "lines in api/": sum(file.text.count("\n") for file in face),
        "writes to foreign attributes in api/": sum(len(foreign_writes(f)) for f in face),
        "writes to foreign attributes": sum(len(foreign_writes(f)) for f in files),
        "reads of foreign privates": sum(len(foreign_privates(f)) for f in files),
        "changeable fields of frozen values": sum(len(changeable_fields(f)) for f in files),
        "functions of more than six parameters or one bool": sum(
            len(wide_signatures(f)) for f in files
        ),
        "files that import private names of PyTorch": sum(
            bool(private_torch_imports(f)) for f in files
        ),
    }


if __name__ == "__main__":
    given = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SOURCE
    for name, number in figures(files_of(given)).items():
        print(f"{number:>6}  {name}")
