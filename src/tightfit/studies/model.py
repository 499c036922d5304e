"""Find the model a user names, call its factory, and check its result.

A model is named ``zoo:NAME``, ``package.module:factory`` or ``path/to/file.py:factory``. A factory
takes ``batch=None`` and returns ``(model, loss, args, target)``. Any error in the user's code
becomes one `BadInput` that says where.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

from tightfit.errors import BadInput
from tightfit.progress import announce
from tightfit.session.handles import PlannedStep, fitted_of
from tightfit.torch_private import core as private
from tightfit.zoo import Example, make
from tightfit.zoo.example import ImageSize

Target: TypeAlias = "str | Callable[..., Any] | tuple[Any, ...]"

_FORMS = "zoo:NAME, package.module:factory or path/to/file.py:factory"
_RETURNS = (
    "a factory returns (model, loss, args, target). The model is an nn.Module. The loss is a "
    "function of (output, target), or None if the output is the loss or carries it as .loss. The "
    "args are a tuple of positional or a dict of keyword inputs; the target may be None"
)


@dataclass(frozen=True)
class ModelSettings:
    """Settings that a model is made with; None: as its factory decides."""

    # batch, sequence: examples per batch and tokens per text, passed to the factory
    batch: int | None = None
    size: ImageSize | None = None  # of images, in pixels; for models of the zoo
    sequence: int | None = None
    # dropout, setting: a probability and a name of sizes; for models of the zoo
    dropout: float | None = None
    setting: str | None = None

    def given(self, *names: str) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def load_example(
    target: Target, settings: ModelSettings | None = None, *, takes_step: bool = False
) -> Example:
    """Return the model with one batch that a target names or holds.

    `target`: a model's name, a factory, or the tuple that a factory returns. `takes_step`: whether
    a `tightfit.step` may take the place of the model. Raises `BadInput` if there is no such model,
    its factory fails or returns something else. Names the line in the user's file.
    """
    settings = settings or ModelSettings()
    if isinstance(target, str) and target.startswith("zoo:"):
        given = settings.given("size", "sequence", "dropout", "setting")
        return make(target.removeprefix("zoo:"), settings.batch, **given)
    if given := settings.given("size", "dropout", "setting"):
        raise BadInput(
            f"{', '.join(given)} can be set for models of the zoo only; let the factory of "
            f"{target!r} decide, or make the model yourself"
        )
    keywords = settings.given("batch", "sequence")
    for key, value in keywords.items():
        if value < 1:
            raise BadInput(f"the {key} must be positive, got {value}")
        if isinstance(target, tuple):
            raise BadInput(f"{key}= needs a factory: a model that exists has its inputs already")
    if isinstance(target, tuple):
        return _checked(target, "the target", takes_step)
    factory = _find(target) if isinstance(target, str) else target
    name = target if isinstance(target, str) else getattr(factory, "__name__", repr(factory))
    if not callable(factory):
        raise BadInput(f"{name} is {_kind_of(factory)}, no factory: {_RETURNS}")
    return _checked(_called(factory, name, keywords), name, takes_step)


def on_fake_tensors(load: Callable[[], Example]) -> Example:
    """Return the result of `load`, made of fake tensors: shapes without memory.

    Code that reads values of tensors while it makes the model cannot run so; it runs for real
    then, announced on standard error.
    """
    try:
        with private.fake_modules():
            return load()
    except BadInput as error:
        if error.__cause__ is None:
            raise
        announce(
            "the model cannot be made on fake tensors "
            f"({type(error.__cause__).__name__}: {_first_line(error.__cause__)}); making it for "
            "real, which takes its memory"
        )
    return load()


def name_of(model: nn.Module | PlannedStep) -> str:
    """Return the name of a model, or of a step in its place, for messages."""
    return fitted_of(model).name if isinstance(model, PlannedStep) else type(model).__name__


def model_inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword inputs of an example's model."""
    inputs = example.args
    return ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})


def loss_function(
    example: Example, runs: Callable[..., Any] | None = None, name: str | None = None
) -> tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]:
    """Return a function that computes an example's loss, with its inputs.

    `runs`: called in the place of the model. `name`: of the function, for messages; by default that
    of the model's class. Returns (function, args, kwargs): ``function(*args, **kwargs)`` runs the
    model and its loss.
    """
    model, loss, _, target = example
    args, kwargs = model_inputs(example)
    called = runs or model
    if loss is not None:
        kwargs["_target"] = target

    def loss_of(*args: Any, _target: Any = None, **kwargs: Any) -> Tensor:
        output = called(*args, **kwargs)
        return _loss_in(output) if loss is None else loss(output, _target)

    loss_of.__name__ = name or type(model).__name__
    return loss_of, args, kwargs


def _loss_in(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        loss: Any = output
    else:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BadInput(
            f"the factory gave no loss and the model's output, {_kind_of(output)}, is "
            f"neither a loss (one number) nor carries one as .loss: {_RETURNS}"
        )
    return loss


# -- finding the factory ------------------------------------------------------------------------


def _find(target: str) -> Any:
    place, colon, attribute = target.rpartition(":")
    if not colon or not place or not attribute:
        raise BadInput(f"{target!r} names no model: write {_FORMS}")
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(Path(place)) if is_file else _load_module(place)
    if not hasattr(module, attribute):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise BadInput(
            f"{place} has no {attribute!r} (it defines: {', '.join(known) or 'no function'})"
        )
    return getattr(module, attribute)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    name = f"tightfit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} is no Python file: write {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable_from(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BadInput(f"importing {path} failed: {explain_error(error, str(path))}") from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        with _importable_from(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise BadInput(
                f"there is no module {error.name!r} here or among the installed packages; for a "
                "file write path/to/file.py:factory"
            ) from error
        raise BadInput(f"importing {name} failed: {explain_error(error)}") from error
    except (Exception, SystemExit) as error:
        raise BadInput(f"importing {name} failed: {explain_error(error)}") from error


@contextlib.contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Let imports find the modules in a folder, as in a script there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


# -- calling it ---------------------------------------------------------------------------------


def _called(factory: Callable[..., Any], name: str, keywords: Mapping[str, int]) -> Any:
    _refuse_more_arguments(factory, name, keywords)
    file = getattr(getattr(factory, "__code__", None), "co_filename", None)
    folder = Path(file).resolve().parent if file else Path.cwd()
    try:
        with _importable_from(folder):
            return factory(**keywords)
    except (Exception, SystemExit) as error:
        for key in keywords:
            if isinstance(error, TypeError) and f"'{key}'" in str(error):
                raise BadInput(
                    f"the factory {name} takes no {key}; write it as factory("
                    f"{', '.join(f'{k}=None' for k in keywords)})"
                ) from error
        raise BadInput(f"the factory {name} failed: {explain_error(error, file)}") from error


def _refuse_more_arguments(
    factory: Callable[..., Any], name: str, keywords: Mapping[str, int]
) -> None:
    """Say so of a factory that cannot be called without arguments of its own."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin, whose signature is unknown
        return
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asked = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in positional and p.name not in keywords
    ]
    if asked:
        raise BadInput(
            f"the factory {name} asks for {', '.join(asked)}, but is called without arguments: "
            "write a function that gives them, or a default for each"
        )


def explain_error(error: BaseException, file: str | None = None) -> str:
    """Return type, message and line of an error that the user's code raised.

    `file`: the user's file; by default the innermost one that is not part of an installed package.
    """
    text = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if file is not None and _same_file(f.filename, file)]
    own = own or [f for f in frames if _is_users(f.filename)]
    if not own:
        return text
    return f"{text} ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})"


def _same_file(a: str, b: str) -> bool:
    return Path(a).resolve() == Path(b).resolve()


def _is_users(filename: str) -> bool:
    return not filename.startswith("<") and not {"site-packages", "importlib"} & {
        *Path(filename).parts
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def _kind_of(value: Any) -> str:
    """Describe a value in a user's words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return "nothing (None)" if value is None else f"{article} {name}"


def _checked(returned: Any, name: str, takes_step: bool) -> Example:
    """Return a factory's result as an example, or raise an error that says what is wrong."""
    if not isinstance(returned, tuple) or len(returned) != 4:
        found = _kind_of(returned)
        if isinstance(returned, tuple):
            found = f"a tuple of {len(returned)}: {', '.join(map(_kind_of, returned))}"
        raise BadInput(f"{name} returned {found}; {_RETURNS}")
    model, loss, inputs, target = returned
    if isinstance(model, PlannedStep) and not takes_step:
        raise BadInput(
            f"the model of {name} is a tightfit.step, which can be proven only; {_RETURNS}"
        )
    if not isinstance(model, nn.Module | PlannedStep):
        call = ", not a module made of it" if isinstance(model, type) else ""
        raise BadInput(f"the model of {name} is {_kind_of(model)}{call}; {_RETURNS}")
    if loss is not None and not callable(loss):
        raise BadInput(f"the loss of {name} is {_kind_of(loss)}; {_RETURNS}")
    if isinstance(inputs, Tensor):
        raise BadInput(f"the args of {name} are one tensor: put it into a tuple (x,); {_RETURNS}")
    if not isinstance(inputs, tuple | dict):
        raise BadInput(f"the args of {name} are {_kind_of(inputs)}; {_RETURNS}")
    return Example(model, loss, inputs, target)
