"""Prove on a user's own program that a budget changes nothing but its memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.progress import SILENT, Progress, announce, shown
from tightfit.scripts.job import Job, RequestedTensor
from tightfit.scripts.record import Difference, Ended, Failure, Line, Record, Step, differences
from tightfit.units import parse_bytes

_LAST_LINES = 5
_PREFIX = "tightfit: "
_CHILD = (  # imports nothing from the folder it is started in
    "import sys; del sys.path[0]; from tightfit.scripts.child import main; main(sys.argv[1])"
)
_SET_ASIDE = ("line", "generator")
"""Events that may differ between runs of a program although it trains alike."""


class ScriptProof(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs of a program."""

    # ``"differs"``: the fitted run does something else than the plain run. ``"not deterministic"``:
    # two plain runs differ, no later than the fitted run does. ``"nothing trained"``: no parameter
    # changes.
    verdict: Literal["proven", "differs", "above budget", "not deterministic", "nothing trained"]
    script: str  # the program
    # steps, lines: optimizer steps and printed lines that were compared
    steps: int
    lines: int
    tensors: int  # gradients, parameters and buffers compared after the last step
    # Where the runs differ first: the plain one from the fitted one, or, if it is not
    # deterministic, from another plain one
    difference: Difference | None
    # The largest difference of two numbers of the tensor that differs first; without limit if only
    # one run has it, None if a second run did not give it again
    largest_difference: float | None
    # Printed lines and random states that two plain runs have not in common: times, say, and
    # generators without a seed. They are not compared.
    left_out: int
    fitted: tuple[str, ...]
    # budget_bytes, measured_peak_bytes, eager_peak_bytes: the budget, and the most that the fitted
    # and the plain run held from `fit` on
    budget_bytes: int | None
    measured_peak_bytes: int | None
    eager_peak_bytes: int | None
    # plain_s, fitted_s: of the whole runs
    plain_s: float
    fitted_s: float

    @property
    def succeeded(self) -> bool:
        """Whether everything was shown."""
        return self.verdict == "proven"

    @property
    def holds(self) -> bool:
        """Whether the measured peak is within the budget, where both are known."""
        if self.budget_bytes is None or self.measured_peak_bytes is None:
            return True
        return self.measured_peak_bytes <= self.budget_bytes


def prove_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    budget: int | str | None = None,
    steps: int = 3,
    threads: int | None = None,
    progress: Progress = SILENT,
    **keywords: Any,
) -> ScriptProof:
    """Run a program plain and fitted, each in a process of its own, and compare everything.

    `budget`: in the place of the budget that the program gives; needed where it fits nothing
    itself. `steps`: optimizer steps to compare; a program that takes more is stopped before the
    next. `threads`: threads of PyTorch. `**keywords`: as `tightfit.fit` takes them, for a
    program that fits nothing itself: planner, costs, cache. Raises `BadInput` if there is no such
    program, it takes no optimizer step, or it ends in an error without tightfit, too. Raises
    `InfeasibleBudget` if there is no plan within the budget.
    """
    if not Path(script).is_file():
        raise BadInput(f"there is no script {script}")
    if steps < 1:
        raise BadInput(f"the number of steps must be positive, got {steps}")
    budget_bytes = None if budget is None else parse_bytes(budget)
    with (
        shown(progress, f"proving {script}", 2),
        tempfile.TemporaryDirectory(prefix="tightfit-prove-") as folder,
    ):
        job = Job(
            way="fitted",
            script=script,
            arguments=tuple(arguments),
            steps=steps,
            budget_bytes=budget_bytes,
            keywords=keywords,
            threads=threads,
            record="",
            answers=os.fspath(Path(folder, "answers")),
        )
        return _Runs(job, Path(folder), progress).proof()


class _Runs:
    """The runs of a program and their comparison."""

    def __init__(self, job: Job, folder: Path, progress: Progress) -> None:
        self._job = job
        self._folder = folder
        self._progress = progress

    def proof(self) -> ScriptProof:
        """Run the program as often as it takes, and compare."""
        fitted = self._run("fitted", "fitted")
        fitted_end = _end_of(fitted)
        _refuse(fitted_end.failure)
        steps = sum(isinstance(event, Step) for event in fitted)
        if not steps and fitted_end.failure is None:
            raise _nothing_stepped(self._job.script, fitted_end)
        self._progress.update(1, "the fitted program has run")
        plain = self._run("plain", "plain")
        plain_end = _end_of(plain)
        _refuse_broken(plain_end, fitted_end, self._job.script)
        difference, unsteady = next(differences(plain, fitted), None), frozenset[int]()
        is_steady = True
        if difference is not None:
            difference, unsteady, is_steady = self._judged(plain, fitted, difference)
        verdict = _verdict(difference, plain_end, fitted_end, is_steady=is_steady)
        return ScriptProof(
            verdict=verdict,
            script=self._job.script,
            steps=steps,
            lines=sum(isinstance(e, Line) and i not in unsteady for i, e in enumerate(fitted)),
            tensors=max((len(e.digests) for e in plain if isinstance(e, Step)), default=0),
            difference=difference,
            largest_difference=self._largest(difference) if is_steady else None,
            left_out=len(unsteady),
            fitted=fitted_end.fitted,
            budget_bytes=fitted_end.budget_bytes,
            measured_peak_bytes=fitted_end.peak_bytes,
            eager_peak_bytes=plain_end.peak_bytes,
            plain_s=plain_end.seconds,
            fitted_s=fitted_end.seconds,
        )

    def _judged(
        self, plain: Record, fitted: Record, difference: Difference
    ) -> tuple[Difference | None, frozenset[int], bool]:
        """Return the first difference due to the plan, values not to compare, and True.

        Where two plain runs differ no later: their difference, values not to compare, and False.
        """
        wanted = self._wanted("plain", difference) if difference.kind == "tensor" else None
        again = self._run("plain", "plain-again", wanted=wanted)
        between = list(differences(plain, again))
        unsteady = frozenset(d.index for d in between if d.kind in _SET_ASIDE)
        first = next((d for d in differences(plain, fitted) if d.index not in unsteady), None)
        other = next((d for d in between if d.kind not in _SET_ASIDE), None)
        if first is not None and other is not None and other.index <= first.index:
            return other, unsteady, False
        return first, unsteady, True

    def _largest(self, difference: Difference | None) -> float | None:
        """Return by how much a tensor differs, which takes the runs up to there once more."""
        if difference is None or difference.kind != "tensor":
            return None
        paths: list[Path] = []
        for way in ("plain", "fitted"):
            wanted = self._wanted(way, difference)
            paths.append(Path(wanted.path))
            if not paths[-1].exists():
                answers = f"{self._job.answers}-again" if way == "fitted" else self._job.answers
                steps = difference.step
                self._run(way, f"{way}-wanted", steps=steps, wanted=wanted, answers=answers)
        return _largest_between(*paths)

    def _wanted(self, way: str, difference: Difference) -> RequestedTensor:
        path = self._folder / f"{way}-{difference.index}.tensor"
        return RequestedTensor(difference.name, difference.step, os.fspath(path))

    def _run(self, way: str, name: str, **changes: Any) -> Record:
        record = Record(self._folder / name)
        job = msgspec.structs.replace(self._job, way=way, record=os.fspath(record.path), **changes)
        path = self._folder / f"{name}.job"
        path.write_bytes(msgspec.json.encode(job))
        errors = self._folder / f"{name}.errors"
        with errors.open("w") as file:  # no pipe: workers that are left behind would hold it
            code = _started(path, file)
        if record.ended() is None:
            raise BadInput(_died(job, code, errors.read_text(errors="replace")))
        if name == "fitted":
            for line in errors.read_text(errors="replace").splitlines():
                if line.startswith(_PREFIX):
                    announce(line.removeprefix(_PREFIX))
        return record


def _started(path: Path, errors: IO[str]) -> int:
    """Run a job in a process of its own; return the code that it ended with."""
    ran = subprocess.run(
        [sys.executable, "-c", _CHILD, os.fspath(path)],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={"PYTHONHASHSEED": "0", **os.environ},  # sets of texts in the same order
    )
    return ran.returncode


def _end_of(record: Record) -> Ended:
    ended = record.ended()
    assert ended is not None  # else its process has died, which was said
    return ended


def _refuse(failure: Failure | None) -> None:
    """Raise the error that there is nothing to prove."""
    if failure is None:
        return
    if failure.refuses == "program":
        raise BadInput(failure.message)
    if failure.refuses == "budget":
        raise InfeasibleBudget(
            failure.message,
            budget_bytes=failure.budget_bytes or 0,
            minimum_bytes=failure.minimum_bytes,
        )


def _refuse_broken(plain: Ended, fitted: Ended, script: str) -> None:
    """Raise if the program ends in an error whether it is fitted or not."""
    if plain.failure is None or fitted.failure is None:
        return
    other = ""
    if fitted.failure != plain.failure:
        other = f". Fitted it ends in another: {fitted.failure.kind}: {fitted.failure.message}"
    raise BadInput(
        f"{script} ends in an error without tightfit, too: {plain.failure.kind}: "
        f"{plain.failure.message}{other}"
    )


def _nothing_stepped(script: str, ended: Ended) -> BadInput:
    code = f" (it ended with code {ended.code})" if ended.code else ""
    return BadInput(
        f"{script} took no optimizer step in its own process{code}: a program that trains nothing "
        "with torch.optim leaves nothing to prove. A model that a factory returns is named "
        "FILE.py:FACTORY"
    )


def _died(job: Job, code: int, errors: str) -> str:
    last = " | ".join(errors.strip().splitlines()[-_LAST_LINES:])
    return f"the {job.way} run of {job.script} died with code {code}: {last or 'it said nothing'}"


def _verdict(
    difference: Difference | None, plain: Ended, fitted: Ended, *, is_steady: bool
) -> Literal["proven", "differs", "above budget", "not deterministic", "nothing trained"]:
    if not is_steady:
        return "not deterministic"
    if difference is not None:
        return "differs"
    if not plain.trained:
        return "nothing trained"
    if fitted.budget_bytes is not None and (fitted.peak_bytes or 0) > fitted.budget_bytes:
        return "above budget"
    return "proven"


def _largest_between(a: Path, b: Path) -> float | None:
    """Return the largest difference of two tensors in files; without limit if only one is there.

    None where they are equal, for the run was not repeated bit by bit.
    """
    import torch

    from tightfit.studies.subject import digest_of

    one, other = (torch.load(path) if path.exists() else None for path in (a, b))
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    if digest_of(one) == digest_of(other):
        return None
    one, other = ((t.to_dense() if t.is_sparse else t).to("cpu") for t in (one, other))
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max())
