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
from tightfit.units import format_bytes, parse_bytes

_LAST_LINES = 5
_PREFIX = "tightfit: "
_CHILD = (  # imports nothing from the folder it is started in
    "import sys; del sys.path[0]; from tightfit.scripts.child import main; main(sys.argv[1])"
)
_MAY_DIFFER = ("line", "generator")
"""Kinds of differences that two plain runs may have although all tensors are equal."""


class ScriptProof(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs of a program."""

    # "not deterministic": two plain runs differ, no later than the plain and the fitted run
    verdict: Literal["proven", "differs", "above budget", "not deterministic", "nothing trained"]
    script: str
    steps: int  # optimizer steps compared
    lines: int  # printed lines compared
    tensors: int  # gradients, parameters and buffers compared after the last step
    # The first one between the plain and the fitted run; between two plain runs if the program is
    # not deterministic
    difference: Difference | None
    # Of two numbers of the tensor that differs first. Infinite if only one run has the tensor;
    # None if the difference did not occur in a second run
    largest_difference: float | None
    # Printed lines and random states that are not compared, since two plain runs differ there:
    # times, say, or generators without a seed
    left_out: int
    fitted: tuple[str, ...]
    budget_bytes: int | None
    measured_peak_bytes: int | None  # of the fitted run, from `fit` on
    eager_peak_bytes: int | None  # of the plain run, from the same moment on
    # seconds of the whole runs:
    plain_s: float
    fitted_s: float

    @property
    def succeeded(self) -> bool:
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

    `budget`: replaces the program's own; needed where it fits nothing itself. `steps`: optimizer
    steps to compare; a program that takes more is stopped before the next. `threads`: of PyTorch.
    `**keywords`: of `tightfit.fit`, such as planner, costs and cache, for a program that fits
    nothing itself. Raises `BadInput` if there is no such program, it takes no optimizer step, or
    it ends in an error without tightfit, too. Raises `InfeasibleBudget` if the budget is refused,
    before a plan is made or during a step.
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
            mode="fitted",
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
        """Run the program as often as necessary, and compare."""
        fitted = self._run("fitted", "fitted")
        fitted_end = _end_of(fitted)
        if fitted_end.failure is not None:
            self._raise_refusal(fitted_end.failure)
        steps = sum(isinstance(event, Step) for event in fitted)
        if not steps and fitted_end.failure is None:
            raise _nothing_stepped(self._job.script, fitted_end)
        self._progress.update(1, "the fitted program has run")
        plain = self._run("plain", "plain")
        plain_end = _end_of(plain)
        _refuse_broken(plain_end, fitted_end, self._job.script)
        difference, not_compared = next(differences(plain, fitted), None), frozenset[int]()
        deterministic = True
        if difference is not None:
            difference, not_compared, deterministic = self._explained(plain, fitted, difference)
        verdict = _verdict(difference, plain_end, fitted_end, deterministic=deterministic)
        return ScriptProof(
            verdict=verdict,
            script=self._job.script,
            steps=steps,
            lines=sum(isinstance(e, Line) and i not in not_compared for i, e in enumerate(fitted)),
            tensors=max((len(e.digests) for e in plain if isinstance(e, Step)), default=0),
            difference=difference,
            largest_difference=self._largest(difference) if deterministic else None,
            left_out=len(not_compared),
            fitted=fitted_end.fitted,
            budget_bytes=fitted_end.budget_bytes,
            measured_peak_bytes=fitted_end.peak_bytes,
            eager_peak_bytes=plain_end.peak_bytes,
            plain_s=plain_end.seconds,
            fitted_s=fitted_end.seconds,
        )

    def _raise_refusal(self, failure: Failure) -> None:
        """Raise the error of a program that cannot be proven, or whose budget is too small.

        What plain PyTorch takes is measured then: that is enough.
        """
        if failure.refuses == "program":
            raise BadInput(failure.message)
        if failure.refuses != "budget":
            return
        plain_bytes = _end_of(self._run("plain", "plain")).peak_bytes
        budget_bytes, least_bytes = failure.budget_bytes or 0, failure.minimum_bytes
        message = failure.message
        if plain_bytes is not None and plain_bytes > budget_bytes:
            message += (
                f"\n  plain     PyTorch takes {plain_bytes} bytes ({format_bytes(plain_bytes)})"
            )
            least_bytes = plain_bytes if least_bytes is None else min(least_bytes, plain_bytes)
        raise InfeasibleBudget(message, budget_bytes=budget_bytes, minimum_bytes=least_bytes)

    def _explained(
        self, plain: Record, fitted: Record, difference: Difference
    ) -> tuple[Difference | None, frozenset[int], bool]:
        """Return the first difference due to the plan, events not to compare, and True.

        Where two plain runs differ no later: their difference, events not to compare, and False.
        """
        is_tensor = difference.kind == "tensor"
        requested = self._requested("plain", difference) if is_tensor else None
        again = self._run("plain", "plain-again", requested=requested)
        of_plain = list(differences(plain, again))
        not_compared = frozenset(d.index for d in of_plain if d.kind in _MAY_DIFFER)
        of_fitted = (d for d in differences(plain, fitted) if d.index not in not_compared)
        first = next(of_fitted, None)
        first_of_plain = next((d for d in of_plain if d.kind not in _MAY_DIFFER), None)
        if first and first_of_plain and first_of_plain.index <= first.index:
            return first_of_plain, not_compared, False
        return first, not_compared, True

    def _largest(self, difference: Difference | None) -> float | None:
        """Return by how much a tensor differs; runs the program up to that step again."""
        if difference is None or difference.kind != "tensor":
            return None
        paths: list[Path] = []
        for mode in ("plain", "fitted"):
            requested = self._requested(mode, difference)
            paths.append(Path(requested.path))
            if not paths[-1].exists():
                answers = f"{self._job.answers}-again" if mode == "fitted" else self._job.answers
                name, steps = f"{mode}-requested", difference.step
                self._run(mode, name, steps=steps, requested=requested, answers=answers)
        return _largest_between(*paths)

    def _requested(self, mode: str, difference: Difference) -> RequestedTensor:
        path = self._folder / f"{mode}-{difference.index}.tensor"
        return RequestedTensor(difference.name, difference.step, os.fspath(path))

    def _run(self, mode: str, name: str, **changes: Any) -> Record:
        record = Record(self._folder / name)
        job = msgspec.structs.replace(self._job, mode=mode, record=f"{record.path}", **changes)
        path = self._folder / f"{name}.job"
        path.write_bytes(msgspec.json.encode(job))
        errors = self._folder / f"{name}.errors"
        with errors.open("w") as file:  # no pipe: workers that outlive the run would keep it open
            code = _exit_code(path, file)
        if record.ended() is None:
            raise BadInput(_death_message(job, code, errors.read_text(errors="replace")))
        if name == "fitted":
            for line in errors.read_text(errors="replace").splitlines():
                if line.startswith(_PREFIX):
                    announce(line.removeprefix(_PREFIX))
        return record


def _exit_code(path: Path, errors: IO[str]) -> int:
    """Run a job in a process of its own."""
    completed = subprocess.run(
        [sys.executable, "-c", _CHILD, os.fspath(path)],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={"PYTHONHASHSEED": "0", **os.environ},  # sets of texts in the same order
    )
    return completed.returncode


def _end_of(record: Record) -> Ended:
    ended = record.ended()
    assert ended is not None  # else `_Runs._run` has raised an error
    return ended


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


def _death_message(job: Job, code: int, errors: str) -> str:
    last = " | ".join(errors.strip().splitlines()[-_LAST_LINES:]) or "it printed no error"
    return f"the {job.mode} run of {job.script} died with code {code}: {last}"


def _verdict(
    difference: Difference | None, plain: Ended, fitted: Ended, *, deterministic: bool
) -> Literal["proven", "differs", "above budget", "not deterministic", "nothing trained"]:
    if not deterministic:
        return "not deterministic"
    if difference is not None:
        return "differs"
    if not plain.trained:
        return "nothing trained"
    if fitted.budget_bytes is not None and (fitted.peak_bytes or 0) > fitted.budget_bytes:
        return "above budget"
    return "proven"


def _largest_between(a: Path, b: Path) -> float | None:
    """Return the largest difference of two tensors in files; infinite if there is only one file.

    None where they are equal, as the difference did not occur again.
    """
    import torch

    from tightfit.studies.bits import digest_of

    tensor_a, tensor_b = (torch.load(path) if path.exists() else None for path in (a, b))
    if tensor_a is None or tensor_b is None or tensor_a.shape != tensor_b.shape:
        return math.inf
    if digest_of(tensor_a) == digest_of(tensor_b):
        return None
    dtype = torch.complex128 if tensor_a.is_complex() else torch.float64
    dense = [t.to_dense() if t.is_sparse else t for t in (tensor_a, tensor_b)]
    wide_a, wide_b = (t.to("cpu", dtype) for t in dense)
    return float((wide_a - wide_b).abs().max())
