"""Which module a frame is of. Private names of torch."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

_PYTORCH = str(Path(nn.modules.__file__).parent)
_BEHIND_A_BREAK = "torch_dynamo_resume_in_"


def module_of_frame(frame: Any) -> nn.Module | None:
    """Return the module that a method is of; None while it is being made: it has nothing yet."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    first = frame.f_locals.get(names[0]) if names else None
    is_made = isinstance(first, nn.Module) and "training" in vars(first)
    return first if is_made else None


def is_behind_a_break(code: types.CodeType) -> bool:
    """Whether code goes on where a graph of Dynamo's has ended."""
    return code.co_name.startswith(_BEHIND_A_BREAK)


def module_at(frame: Any) -> nn.Module | None:
    """Return the module that a frame is of.

    Behind a break that is the first among its inputs and closed-over variables.
    """
    module = module_of_frame(frame)
    if module is not None or not is_behind_a_break(frame.f_code):
        return module
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount] + frame.f_code.co_freevars
    given = (frame.f_locals.get(name) for name in names)
    return next((each for each in given if isinstance(each, nn.Module)), None)


def is_forward_of_pytorch(code: types.CodeType) -> bool:
    """Whether code is a forward in PyTorch's own files of modules, as that of `nn.Linear`.

    Dynamo skips these files where nothing that it traces calls them, as after a break.
    """
    is_forward = code.co_name == "forward" and code.co_varnames[:1] == ("self",)
    return is_forward and code.co_filename.startswith(_PYTORCH)


def codes_of_forwards(modules: Iterable[nn.Module]) -> Iterator[types.CodeType]:
    """Yield the code of the forwards of modules; not where the user has Dynamo skip it."""
    for forward in {_forward(module) for top in modules for module in top.modules()}:
        code = getattr(forward, "__code__", None)
        if code is not None and not getattr(forward, "_torchdynamo_disable", False):
            yield code


def _forward(module: nn.Module) -> Any:
    """Return the function that is a module's forward, its own or its class's."""
    own = vars(module).get("forward")
    return getattr(own, "__func__", own) or getattr(type(module), "forward", None)
