"""Options that several commands share: the step, the time of a search, the form of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter, Token

from tightfit.errors import BadInput
from tightfit.planners.base import Limits
from tightfit.units import parse_bytes

OptimizerName: TypeAlias = Literal["none", "sgd", "momentum", "adamw"]

Json: TypeAlias = Annotated[bool, Parameter(negative="", help="Print one JSON object.")]


def _is_readable(_: object, text: str | None) -> None:
    """Refuse a budget that is no size before anything is loaded for it."""
    if text not in (None, "minimum"):
        parse_bytes(text)


BudgetText: TypeAlias = Annotated[
    str | None, Parameter(allow_leading_hyphen=True, validator=_is_readable)
]
StepBudget: TypeAlias = Annotated[
    BudgetText, Parameter(help="The budget with a unit, such as 8GiB, constants included.")
]
StepName: TypeAlias = Annotated[
    str,
    Parameter(
        help=(
            "A graph file (.json or .json.gz), or a model: zoo:NAME, package.module:factory or "
            "path/to/file.py:factory."
        )
    ),
]
PlanFile: TypeAlias = Annotated[Path, Parameter(help="A plan file (.json or .json.gz).")]
GraphOfPlan: TypeAlias = Annotated[str, Parameter(help="The graph file the plan was made for.")]
OtherCosts: TypeAlias = Annotated[
    str | None,
    Parameter(help="Modelled costs instead of those in the file, such as unit, flops, v100, a100."),
]
PlannerName: TypeAlias = Annotated[
    str,
    Parameter(
        help="Which planner: anytime, or one of those tightfit compare runs, such as checkmate+."
    ),
]


def _as_share(_: object, tokens: Sequence[Token]) -> float:
    """Read a share; say how one is written."""
    text = tokens[0].value
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"{text!r} is no share: write 0.5 for half, not 50%") from None


Share: TypeAlias = Annotated[float | None, Parameter(converter=_as_share)]
ActivationShare: TypeAlias = Annotated[
    Share,
    Parameter(
        help="The budget as a share of the activation peak with nothing recomputed, such as 0.5."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """Settings that a model is made with.

    Parameters
    ----------
    batch
        Examples per batch; passed to the factory.
    size
        Image size in pixels, such as 224 or 416x608 (height x width); zoo models.
    sequence
        Tokens per text; passed to the factory.
    dropout
        Dropout probability; zoo models.
    setting
        Sizes of a paper by name, such as monet or checkmate; zoo models.
    """

    batch: int | None = None
    size: str | None = None
    sequence: int | None = None
    dropout: float | None = None
    setting: str | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the options as `tightfit.studies.model.ModelSettings` has them."""
        own = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
        return {**own, "size": None if self.size is None else _size(self.size)}

    @property
    def given(self) -> list[str]:
        """The names of the model's options that are given."""
        return [name for name, value in self.keywords().items() if value is not None]


@Parameter(name="*")
@dataclass(frozen=True)
class StepOptions(ModelOptions):
    """A step, of a model or in a file.

    Parameters
    ----------
    optimizer
        The optimizer whose state is counted, for a model: momentum keeps one copy of the
        parameters, adamw two.
    gradients
        fresh: the step makes them, as after zero_grad(); accumulated: it adds to those that are
        there.
    costs
        The source of operators' times. cpu: this machine's roofline, the default for a model.
        measured: each distinct operator of a model is timed once, by itself. p100, v100, a100,
        h100: a GPU's roofline, and sizes as its allocator rounds them. Others: unit, flops. A graph
        file brings its own.
    """

    optimizer: OptimizerName = "adamw"
    gradients: Literal["fresh", "accumulated"] = "fresh"
    costs: str | None = None

    def step_keywords(self) -> dict[str, Any]:
        """Return the options as `tightfit.studies.dry_step.captured_step` takes them."""
        own = {"optimizer": self.optimizer, "gradients": self.gradients}
        return {**own, "costs": self.costs or "cpu", **self.keywords()}


@Parameter(name="*")
@dataclass(frozen=True)
class PlanOptions(StepOptions):
    """A step, and how long a search for plans of it may take.

    Parameters
    ----------
    time_limit
        Seconds to plan at most, for each plan.
    iterations
        Search iterations at most; the result then depends on the seed only, not on the machine.
    seed
        Seed of every random choice.
    """

    time_limit: float = Limits().seconds
    iterations: int | None = None
    seed: int = 0

    def limits(self, **others: Any) -> Limits:
        """Return the limits of the search; parameters and errors are those of `chosen_limits`."""
        return chosen_limits(self.time_limit, iterations=self.iterations, seed=self.seed, **others)


DEFAULT_MODEL_OPTIONS = ModelOptions()
DEFAULT_STEP_OPTIONS = StepOptions()
DEFAULT_PLAN_OPTIONS = PlanOptions()


def chosen_limits(time_limit: float, **others: Any) -> Limits:
    """Return the limits of a search; `others`: further fields of `Limits`.

    Raises `BadInput` if the time limit, in seconds, is not positive.
    """
    if not time_limit > 0:
        raise BadInput(f"--time-limit must be a positive number of seconds, got {time_limit}")
    return Limits(seconds=time_limit, **others)


def is_model(target: str) -> bool:
    """Whether a command's first argument names a model rather than a file."""
    return ":" in target and not target.endswith((".json", ".json.gz"))


def require_model(target: str, hint: str) -> None:
    """Refuse a target that names no model.

    `hint`: advice for a user who gave a graph file. Raises `BadInput` if it names none.
    """
    if target.endswith(".py"):
        raise BadInput(
            f"{target!r} names a file but no function in it: write {target}:make, where make is "
            "the function that returns your model (tightfit init writes such a file)"
        )
    if not is_model(target):
        raise BadInput(
            f"{target!r} names no model: write zoo:NAME, package.module:factory or "
            f"path/to/file.py:factory ({hint})"
        )


def _size(text: str) -> int | tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise BadInput(f"cannot read the size {text!r}: write 224 or 416x608 (height x width)")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
