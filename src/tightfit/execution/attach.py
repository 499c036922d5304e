"""Fit a module in place: its `forward`, and methods that are named, are replaced; no more.

`state_dict`, the type, `isinstance`, hooks of the module itself, `torch.save` and `pickle` (of the
plain model) keep working; no public attribute is added. The forward that runs instead is stored in
the module, so both live and die together; a deep copy of the module is fitted again on its first
call. Other tools may wrap the replaced forward (by `functools.wraps`, as autocast does): it is
found beneath theirs.
"""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from tightfit.capture.opaque.running import in_opaque_call
from tightfit.errors import WITHOUT_A_PLAN, BadInput, TightfitError, as_user_sees_it
from tightfit.progress import announce
from tightfit.torch_private import tools

_FITTED: WeakSet[nn.Module] = WeakSet()
_PLANNED: WeakSet[Any] = WeakSet()
"""The functions that replace forwards."""
_KEY = "__tightfit"
_WAS_FITTED = "__tightfit_was_fitted"
_COPYING = ("__reduce_ex__", "__deepcopy__")
"""Of a fitted module's own: it is saved as the plain module and copied as itself."""


class Attached(Protocol):
    """A callable that runs in place of a module's forward."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Run one forward."""

    def is_of(self, module: nn.Module, /) -> bool:
        """Whether this was made for the module (and not for one it was copied from)."""

    def leave(self) -> None:
        """Clean up: the module is fitted no longer, or again."""


class _Attachment:
    """Record in a fitted module, from which a copy of the module gets its own."""

    def __init__(
        self,
        made: Attached | None,
        refit: Callable[[nn.Module], Attached],
        methods: Mapping[str, Attached | None],
    ) -> None:
        self.made = made
        self.refit = refit
        self.methods = methods
        self._running: set[int] = set()

    def of(self, module: nn.Module, name: str = "forward") -> Attached:
        """Return the attachment of the module; a copy gets its own now."""
        if self.made is None or not self.made.is_of(module):
            made = self.refit(module)
            return made if name == "forward" else attached_methods(module)[name]
        method = self.methods.get(name)
        return self.made if method is None else method

    @property
    def is_running(self) -> bool:
        """Whether a replaced method runs in this thread: others called by it run plainly."""
        return threading.get_ident() in self._running

    def __enter__(self) -> None:
        self._running.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._running.discard(threading.get_ident())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return _Attachment(None, self.refit, dict.fromkeys(self.methods))

    def __reduce__(self) -> Any:
        return type(None), ()  # of a class that pickles itself in its own way


def _planned_function(module: nn.Module) -> Any:
    """Return the function that replaces a module's forward, or None; others may wrap it."""
    seen: set[int] = set()
    function = module.__dict__.get("forward")
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function in _PLANNED:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def attached(module: nn.Module) -> Attached | None:
    attachment = module.__dict__.get(_KEY)
    if attachment is None or _planned_function(module) is None:
        return None
    return attachment.of(module)


def attached_methods(module: nn.Module) -> Mapping[str, Attached]:
    """Return the replacements of a fitted module's methods, but for its forward."""
    attachment = module.__dict__.get(_KEY)
    methods = {} if attachment is None else attachment.methods
    return {name: method for name, method in methods.items() if method is not None}


def original_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method that a module has without tightfit.

    Raises `BadInput` if the module's class has no method of that name, or the instance one of its
    own.
    """
    kind, method = type(module), getattr(type(module), name, None)
    if not inspect.isfunction(method) or name in vars(nn.Module) or name == "forward":
        own = ", ".join(own_methods(kind)) or "none"
        raise BadInput(
            f"methods= names {name!r}, which is no method of {kind.__name__} other than its "
            f"forward (it has: {own})"
        )
    here = module.__dict__.get(name)
    if here is not None and getattr(here, "__func__", None) not in _PLANNED:
        raise BadInput(
            f"methods= names {name!r}, which was replaced in this {kind.__name__}: fit the model "
            "before that is done"
        )
    return types.MethodType(method, module)


def own_methods(kind: type) -> list[str]:
    """Return the names of the public methods that a class of modules has of its own.

    Those of PyTorch's containers, such as ``append``, train nothing.
    """
    found = {
        name: None
        for base in kind.__mro__
        if base not in nn.Module.__mro__ and not base.__module__.startswith("torch.nn.")
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith("_") and name != "forward"
    }
    return [name for name in found if name not in vars(nn.Module)]


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward a module has without tightfit, its own if it has been given any."""
    own = module.__dict__.get("forward")
    if own is not None and _planned_function(module) is None:
        return own
    return types.MethodType(type(module).forward, module)


def attach(
    module: nn.Module,
    made: Attached,
    refit: Callable[[nn.Module], Attached],
    methods: Mapping[str, Attached] | None = None,
) -> None:
    """Let something run in place of the forward of a module.

    `module`: fitted in place; an earlier attachment is replaced. `made`: called with (args,
    kwargs) instead of the module's forward. `refit`: attaches something new to a deep copy of the
    module and returns it. `methods`: callables that run in place of further methods, when none of
    the others is running. Raises `BadInput` if the module cannot be fitted; see
    `refuse_unfittable`.
    """
    refuse_unfittable(module)
    _put(module, _Attachment(made, refit, methods or {}))


def attach_part(module: nn.Module, part: Attached) -> None:
    """Replace the forward of a module inside a model that is fitted part by part.

    `module`: inside the model; its ancestors may be fitted. `part`: called with (args, kwargs)
    instead of the module's forward. Raises `BadInput` if the module's forward was replaced by
    somebody else.
    """
    _refuse_foreign(module)

    def refit(copy: nn.Module) -> Attached:
        raise BadInput(
            f"a copy of a {type(copy).__name__} was made out of a model that is fitted part by "
            "part: tightfit.unfit the model before copying it, then fit the copy"
        )

    _put(module, _Attachment(part, refit, {}))


def refuse_unfittable(module: nn.Module) -> None:
    """Refuse a module whose forward cannot be replaced.

    Raises `BadInput` if an ancestor or a child of the module is fitted, or if the module is
    compiled or wrapped. So does a forward that other code has replaced, and a module without
    weights yet.
    """
    _refuse_lazy(module)
    _refuse_wrapped(module)
    _refuse_nested(module)
    _refuse_foreign(module)


def _refuse_lazy(module: nn.Module) -> None:
    for name, each in module.named_modules():
        # classes may have methods of their own in place of these, with other arguments
        own = (*nn.Module.parameters(each, recurse=False), *nn.Module.buffers(each, recurse=False))
        if any(map(nn.parameter.is_lazy, own)):
            raise BadInput(
                f"module {name!r} ({type(each).__name__}) has no weights yet: they are made when "
                "it first runs. Call the model once (in torch.no_grad()), make the optimizer, then "
                f"fit it. {WITHOUT_A_PLAN}"
            )


def _refuse_foreign(module: nn.Module) -> None:
    own = module.__dict__.get("forward")
    foreign = own is not None and getattr(own, "__func__", None) is not type(module).forward
    if foreign and _planned_function(module) is None:
        raise BadInput(
            "the forward of this instance was replaced by another tool "
            f"({getattr(own, '__module__', '?')}): fit the model before that tool wraps it"
        )


def _put(module: nn.Module, attachment: _Attachment) -> None:
    module.__dict__.pop(_WAS_FITTED, None)
    if _planned_function(module) is None:
        function = _planned_method("forward", type(module).forward)
        module.__dict__["forward"] = types.MethodType(function, module)
    for name in module.__dict__.get(_KEY, attachment).methods:
        module.__dict__.pop(name, None)
    for name in attachment.methods:
        function = _planned_method(name, getattr(type(module), name))
        module.__dict__[name] = types.MethodType(function, module)
    module.__dict__[_KEY] = attachment
    _put_copying(module)
    _FITTED.add(module)


def _put_copying(module: nn.Module) -> None:
    """Let a fitted module be pickled as the plain module, and copied with its attachment.

    `pickle` and `copy` ask the object for these methods, before its class.
    """
    for name, method in zip(_COPYING, (_pickled_plainly, _copied), strict=True):
        module.__dict__[name] = types.MethodType(method, module)


def _pickled_plainly(module: nn.Module, protocol: int) -> Any:
    """Return the reduction of the plain model by its class; loading it needs no tightfit."""
    reduced = type(module).__reduce_ex__(module, protocol)  # type: ignore[arg-type]
    if len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    hidden = {_KEY, *_COPYING, *module.__dict__[_KEY].methods}
    if _planned_function(module) is getattr(module.__dict__["forward"], "__func__", None):
        hidden.add("forward")
    announce(f"{type(module).__name__} is saved as the plain model: fit it again after loading")
    state = {key: value for key, value in reduced[2].items() if key not in hidden}
    return (*reduced[:2], {**state, _WAS_FITTED: True}, *reduced[3:])


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy, to which something is attached on its first call."""
    own = {name: module.__dict__.pop(name) for name in _COPYING}
    try:
        twin = copy.deepcopy(module, memo)
    finally:
        module.__dict__.update(own)
    _put_copying(twin)
    return twin


def was_fitted(module: nn.Module) -> bool:
    """Whether a plain module was loaded from a file into which a fitted module was saved."""
    return _WAS_FITTED in module.__dict__


def _planned_method(name: str, replaced: Any) -> Any:
    """Return a replacement for the forward of a class, or for another method."""

    def planned(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = self.__dict__.get(_KEY)
        # unfitted while another tool wraps this function, or called by what is planned already
        if attachment is None or attachment.is_running or in_opaque_call():
            return replaced(self, *args, **kwargs)
        try:
            with tools.WithoutDynamo(), attachment:
                return attachment.of(self, name)(args, kwargs)
        except TightfitError as error:
            raise as_user_sees_it(error) from error.__cause__

    planned.__signature__ = inspect.signature(replaced)  # type: ignore[attr-defined]
    planned.__doc__ = replaced.__doc__
    tools.hide_from_dynamo(planned)
    _PLANNED.add(planned)
    return planned


def _refuse_wrapped(module: nn.Module) -> None:
    kind = type(module).__name__
    if kind in ("OptimizedModule", "DistributedDataParallel", "DataParallel"):
        raise BadInput(
            f"the model is wrapped ({kind}): fit the inner module first, then wrap it. "
            f"{WITHOUT_A_PLAN}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise BadInput(
            f"the model is scripted ({kind}): its code cannot be planned. Fit the plain module "
            f"(PYTORCH_JIT=0 in the environment has torch.jit leave it plain). {WITHOUT_A_PLAN}"
        )
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        raise BadInput(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), which runs collectives in "
            "its forward. Shard it with torch.distributed.fsdp.fully_shard (FSDP2), then fit it. "
            f"{WITHOUT_A_PLAN}"
        )


def _refuse_nested(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if child is not module and child in _FITTED:
            raise BadInput(
                f"the child module {name!r} is fitted already: tightfit.unfit it first; one plan "
                "then covers the whole model"
            )
    if _fitted_around(module) is not None:
        gc.collect()  # a model that was freed is not fitted
    other = _fitted_around(module)
    if other is not None:
        raise BadInput(
            f"the module is part of a fitted {type(other).__name__}, whose plan covers it: "
            "tightfit.unfit that first, or leave this module alone"
        )


def _fitted_around(module: nn.Module) -> nn.Module | None:
    return next(
        (o for o in list(_FITTED) if o is not module and any(m is module for m in o.modules())),
        None,
    )


def detach(module: nn.Module) -> bool:
    """Give a module its own forward back; return whether it was fitted."""
    function = _planned_function(module)
    attachment = None if function is None else module.__dict__.pop(_KEY, None)
    if attachment is None:
        return False
    for name in (*_COPYING, *attachment.methods):
        module.__dict__.pop(name, None)
    if getattr(module.__dict__["forward"], "__func__", None) is function:
        del module.__dict__["forward"]
    _FITTED.discard(module)
    return True


def unfit_for_now(module: nn.Module) -> Callable[[], None]:
    """Give a fitted module its own forward back for a while; return a function that fits it again
    as it was.

    Its attachment stays as it is meanwhile, captured steps and plans included.
    """
    names = {_KEY, "forward", *_COPYING, *module.__dict__[_KEY].methods}
    own = {name: value for name, value in module.__dict__.items() if name in names}
    detach(module)

    def fit_again() -> None:
        module.__dict__.update(own)
        _FITTED.add(module)

    return fit_again
