"""What code loads, by name: globals, attributes, imports; without running it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType

__all__ = ["Names", "names_of"]

_ASKING = frozenset({"getattr", "hasattr", "attrgetter", "__getattribute__", "__getattr__"})
_WHOLE = frozenset({"vars", "__dict__", "asdict", "astuple", "replace", "fields", "copy"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"})


@dataclass(frozen=True)
class Names:
    """What code loads.

    Parameters
    ----------
    globals, attributes : frozenset of str
        Names of globals, and of attributes of whatever objects.
    asked : frozenset of str
        Those of attributes that may well not be there.
    imports : frozenset of (str, str)
        Modules imported while it runs, each with a name taken from it; "": the module.
    whole : bool
        Whether it may read every attribute of an object: by `vars`, or by a computed name.
    """

    globals: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    imports: frozenset[tuple[str, str]] = frozenset()
    whole: bool = False

    @classmethod
    def of_all(cls, parts: Iterable[Names]) -> Names:
        """Return what several pieces of code load together."""
        every = tuple(parts)
        return cls(
            frozenset().union(*(n.globals for n in every)),
            frozenset().union(*(n.attributes for n in every)),
            frozenset().union(*(n.asked for n in every)),
            frozenset().union(*(n.imports for n in every)),
            any(n.whole for n in every),
        )


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return what code loads by name; code nested in it counts by itself, once it runs."""
    loaded: set[str] = set()
    attributes: set[str] = set()
    imports: set[tuple[str, str]] = set()
    module = ""
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in _ATTRIBUTES:
            attributes.add(name)
        elif instruction.opname in _GLOBALS:
            loaded.add(name)
        elif instruction.opname == "IMPORT_NAME":
            module = name
            imports.add((module, ""))
        elif instruction.opname == "IMPORT_FROM":
            imports.add((module, name))
    asks = not _ASKING.isdisjoint(loaded | attributes)
    texts = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    asked = frozenset(texts) if asks else frozenset[str]()
    whole = not _WHOLE.isdisjoint(loaded | attributes) or (asks and _computes_names(code))
    return Names(frozenset(loaded), frozenset(attributes) | asked, asked, frozenset(imports), whole)


def _computes_names(code: CodeType) -> bool:
    """Whether a name that is asked for may be none of the constants."""
    waiting = False
    for instruction in dis.get_instructions(code):
        if instruction.argval in _ASKING and instruction.opname.startswith("LOAD"):
            waiting, constant = True, False
        elif waiting and instruction.opname == "LOAD_CONST":
            constant = constant or isinstance(instruction.argval, str)  # pyright: ignore
        elif waiting and instruction.opname in ("FORMAT_VALUE", "BUILD_STRING", "FORMAT_SIMPLE"):
            return True
        elif waiting and instruction.opname.startswith("CALL"):
            if not constant:  # pyright: ignore
                return True
            waiting = False
    return False
