"""The rules of the architecture: who imports whom, who changes what, where PyTorch is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from support.architecture import (
    SPECIAL,
    File,
    body_lines,
    changeable_fields,
    circles_of,
    files_of,
    folders_of,
    foreign_privates,
    foreign_writes,
    private_torch_imports,
    wide_signatures,
)

FILES = files_of()

FOUNDATION = {"units", "errors", "progress", "files", "living", "version"}
"""What every room may import: they import nothing of tightfit but each other."""

MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in FOUNDATION},
    "_core": set(),
    "torch_private": set(),
    "zoo": set(),
    "graph": set(),
    "eviction": {"_core"},
    "allocator": {"torch_private", "_core"},
    "plan": {"graph"},
    "reporting": {"graph", "plan"},
    "planners": {"graph", "plan", "eviction", "_core"},
    "layout": {"graph", "plan", "planners", "_core"},
    "arenas": {"allocator", "layout"},
    "costs": {"graph", "torch_private"},
    "capture": {"graph", "plan", "costs", "allocator", "torch_private", "_core"},
    "alternatives": {"graph", "capture"},
    "dynamic": {"eviction", "allocator", "torch_private"},
    "pricing": {"graph", "costs", "capture", "allocator", "torch_private"},
    "execution": {"graph", "plan", "capture", "allocator", "torch_private"},
    "dynamo": {"capture", "allocator", "torch_private"},
}
"""Each room's row in docs/architecture.md; what builds on several others follows."""

MAY_IMPORT["session"] = {*MAY_IMPORT} - {"_core", "zoo", "reporting", "eviction", "dynamic"}
MAY_IMPORT["studies"] = MAY_IMPORT["session"] | {"session", "zoo"}
MAY_IMPORT["api"] = MAY_IMPORT["studies"] | {"studies", "reporting", "dynamic", "eviction"}
MAY_IMPORT["scripts"] = MAY_IMPORT["api"] | {"api"}
MAY_IMPORT["cli"] = {
    "api",
    "scripts",
    "studies",
    "reporting",
    "layout",
    "planners",
    "eviction",
    "plan",
}
MAY_IMPORT["cli"] |= {"graph", "costs", "capture", "dynamic"}
MAY_IMPORT["integrations"] = {"api", "allocator", "torch_private"}
MAY_IMPORT["__main__"] = {"cli"}

ALSO = {"costs/measured": {"allocator"}}
"""What parts of a room may import besides."""

ORDERS: dict[str, tuple[str, ...]] = {
    "capture": (
        "exclusive flops libraries nodes origins",
        "side_effects operators",
        "calls",
        "restored",
        "opaque decisions",
        "joint_graph traced_call handed",
        "captured graph_calls trace normalise updates",
        "recall",
        "stored",
        "lift foreign partitioner input_uses stepping",
        "capture",
    ),
    "eviction": (
        "classes",
        "replayed",
        "log policies",
        "simulator",
        "figures",
    ),
    "arenas": ("sequence", "arena", "calls fillers"),
    "layout": (
        "blocks",
        "io of_plan validate packers predecessors",
        "pack",
        "within holes",
    ),
    "planners": (
        "background base bounds child",
        "solvers",
        "outcomes",
        "engine registry orders",
        "apart",
        "anytime",
        "moves",
        "questions",
        "papers",
    ),
    "session": (
        "callee report refusals processes bypass outputs untrained new_calls",
        "checkpoints",
        "step",
        "memory",
        "options copies handed_calls",
        "followed",
        "stages default_addresses",
        "on_gpu",
        "addresses",
        "parts whole",
        "graphs",
        "fitted",
        "handles",
    ),
}
"""Floors inside the large rooms, the lowest first: what stands on one imports lower ones only."""

TORCH_ROOMS = {
    "allocator",
    "alternatives",
    "api",
    "arenas",
    "capture",
    "execution",
    "integrations",
    "dynamic",
    "dynamo",
    "pricing",
    "scripts",
    "session",
    "studies",
    "torch_private",
    "zoo",
}
TORCH_PLACES = ("costs/measured/",)

CHANGES_ONLY_ITS_OWN = {
    "api",
    "arenas",
    "cli",
    "costs",
    "eviction",
    "graph",
    "layout",
    "plan",
    "planners",
    "reporting",
    "scripts",
    "session",
    "studies",
}
"""Rooms in which no object's attributes are written by other code."""

MOST_LINES = 500
LONGEST_BODY = 60
"""Lines of a function without its signature and docstring."""
LARGEST_FOLDER = 18
FREE_SIGNATURES = ("api/", "cli/", "zoo/", "alternatives/", "capture/operators/")
"""Where users, the command line, papers or PyTorch's operators say what a function takes."""
WIDE_SIGNATURES = 1
"""Functions elsewhere that take more than six parameters, or more than one bool.

`make_options`, which takes the keywords of `tightfit.fit`.
"""


def room_of(place: str) -> str:
    return place.split("/")[0].removesuffix(".py")


def is_torch_free(file: File) -> bool:
    return room_of(file.place) not in TORCH_ROOMS and not file.place.startswith(TORCH_PLACES)


def of_every_file(test: Callable[[File], None]) -> Callable[[], None]:
    """Return a test of every file, which fails with the complaints about all of them."""

    def of_all() -> None:
        complaints: list[str] = []
        for file in FILES:
            try:
                test(file)
            except AssertionError as error:
                complaints.append(str(error))
        assert not complaints, "\n".join(complaints)

    of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
    return of_all


def offends(file: File, found: list[tuple[int, str]], why: str) -> None:
    """Fail if a file offends; say where."""
    assert not found, "\n".join(f"{file.path}:{n}: {text}: {why}" for n, text in found)


@of_every_file
def test_imports_follow_the_table(file: File) -> None:
    room = room_of(file.place)
    if room == "__init__":
        return
    also = next((more for place, more in ALSO.items() if file.place.startswith(place)), set())
    allowed = MAY_IMPORT[room] | also | FOUNDATION | {room}
    found = [
        (line, name)
        for line, name in file.imports
        if name.startswith("tightfit.") and name.split(".")[1] not in allowed
    ]
    offends(file, found, f"{room} may not import that")


@of_every_file
def test_imports_inside_a_room_lead_downwards(file: File) -> None:
    room, *inner = file.place.removesuffix(".py").split("/")
    floors = {name: n for n, names in enumerate(ORDERS.get(room, ())) for name in names.split()}
    if not floors or inner[0] in SPECIAL:
        return
    assert inner[0] in floors, f"{file.place} stands on no floor"
    found: list[tuple[int, str]] = []
    for line, name in file.imports:
        parts = name.split(".")
        if parts[:2] != ["tightfit", room] or len(parts) < 3 or parts[2] == inner[0]:
            continue
        if floors.get(parts[2], 99) >= floors[inner[0]]:
            found.append((line, name))
    offends(file, found, f"{inner[0]} stands below that, or next to it")


@of_every_file
def test_torch_is_imported_only_where_it_belongs(file: File) -> None:
    if is_torch_free(file):
        for line, name in file.imports:
            assert name.split(".")[0] not in ("torch", "torchvision"), f"{file.path}:{line} {name}"


@of_every_file
def test_nothing_imports_the_planners_of_papers(file: File) -> None:
    papers = "tightfit.planners.papers"
    if not file.module.startswith(papers):
        found = [(line, name) for line, name in file.imports if name.startswith(papers)]
        offends(file, found, "the registry loads it by its name")


def test_every_room_has_a_row() -> None:
    assert {room_of(file.place) for file in FILES} - {"__init__"} <= MAY_IMPORT.keys()


def test_no_circle_of_files() -> None:
    assert not circles_of(FILES)


@of_every_file
def test_private_names_of_pytorch_have_a_room_of_their_own(file: File) -> None:
    if room_of(file.place) != "torch_private":
        found = private_torch_imports(file)
        offends(file, found, "goes to torch_private")


@of_every_file
def test_private_names_are_used_only_in_their_own_file(file: File) -> None:
    if room_of(file.place) != "torch_private":
        offends(file, foreign_privates(file), "is private to another file")


@of_every_file
def test_attributes_are_written_only_by_their_own_object(file: File) -> None:
    if room_of(file.place) in CHANGES_ONLY_ITS_OWN:
        offends(file, foreign_writes(file), "belongs to another object: ask it")


@of_every_file
def test_frozen_values_hold_nothing_that_changes(file: File) -> None:
    offends(file, changeable_fields(file), "can be changed in a frozen value")


@of_every_file
def test_files_and_functions_have_a_size_one_can_read(file: File) -> None:
    assert file.text.count("\n") <= MOST_LINES, file.place
    for function in file.functions:
        where = f"{file.path}:{function.lineno}: {function.name}"
        assert body_lines(function) <= LONGEST_BODY, where


def test_functions_take_few_parameters() -> None:
    files = [file for file in FILES if not file.place.startswith(FREE_SIGNATURES)]
    wide = [(file.place, *where) for file in files for where in wide_signatures(file)]
    assert len(wide) <= WIDE_SIGNATURES, "\n".join(map(str, wide))


def test_folders_have_a_size_one_can_read() -> None:
    large = {name: n for name, n in folders_of(FILES).items() if n > LARGEST_FOLDER}
    assert not large


def test_importing_the_torch_free_half_never_imports_torch() -> None:
    modules = [
        file.module
        for file in FILES
        if is_torch_free(file) and room_of(file.place) != "cli" and file.path.stem not in SPECIAL
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
