"""The process that runs a program."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tightfit.allocator.refusals import budget_exceeded, is_refusal
from tightfit.errors import BudgetExceeded, InfeasibleBudget, TightfitError
from tightfit.scripts.answers import RecordedAnswers, RepeatedAnswers
from tightfit.scripts.calls import OutermostCalls
from tightfit.scripts.fitter import Fitter
from tightfit.scripts.job import CannotProve, EnoughSteps, Job
from tightfit.scripts.program_memory import ProgramMemory
from tightfit.scripts.record import Ended, Failure, Generator, Line, Record, Step
from tightfit.scripts.replaced_functions import replaced_functions
from tightfit.scripts.trained import TrainedModules
from tightfit.session.memory.account import lift_every_limit
from tightfit.studies.model import explain_error
from tightfit.torch_private import engine
from tightfit.torch_private.patches import replaced


class _Run:
    """A run of a program, and its record."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._record = Record(Path(job.record))
        self._trained = TrainedModules()
        self._memory = ProgramMemory()
        self._fitter = Fitter(job, self._trained, self._memory)
        self._steps = 0
        self._backward = -1  # the last one in which an optimizer has stepped
        self._has_trained = False
        self._first_digests: dict[str, str] | None = None
        self._hook: Any = None

    def run(self) -> None:
        """Run the program until it ends or has taken its steps."""
        began_s, began = time.perf_counter(), _random_states()
        is_plain = self._job.mode == "plain"
        answers = (RepeatedAnswers if is_plain else RecordedAnswers)(Path(self._job.answers))
        with contextlib.ExitStack() as around:
            around.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            around.callback(self._remove_hook)
            around.enter_context(replaced_functions(self._fitter, answers, is_plain=is_plain))
            around.enter_context(OutermostCalls(self._before_call))
            around.enter_context(_each_new_optimizer(self._fitter.on_new_optimizer))
            output = around.enter_context(contextlib.closing(_output(self._record_line)))
            around.enter_context(contextlib.redirect_stdout(output))
            code, failure = _run_program(self._job)
        peak_bytes = self._memory.take_peak_bytes()
        lift_every_limit()  # what follows belongs to no step
        # At the end: the first steps may be of parameters outside of modules
        refusal = self._fitter.refusal() if self._steps and failure is None else None
        if refusal is not None:
            code, failure = 1, _failure(refusal, self._job.script)
        for name, digest in _random_states().items():
            self._record.add(Generator(name, "" if digest == began.get(name) else digest))
        self._record.add(
            Ended(
                code=code,
                trained=self._has_trained,
                fitted=self._fitter.names,
                budget_bytes=self._memory.budget_bytes,
                peak_bytes=peak_bytes,
                seconds=time.perf_counter() - began_s,
                failure=failure,
            )
        )

    def _record_line(self, text: str) -> None:
        self._record.add(Line(text))

    def _before_call(self, module: torch.nn.Module) -> None:
        self._memory.drop_freed()
        self._trained.add(module)
        self._fitter.before_call(module)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._steps == self._job.steps:
            raise EnoughSteps
        self._trained.add_optimizer(optimizer)
        self._remove_hook()  # hooks of the program come first
        self._hook = register_optimizer_step_post_hook(self._after_step)
        if self._first_digests is None:
            self._first_digests = self._trained.digests()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name = self._trained.add_optimizer(optimizer)
        if not engine.in_backward():
            self._end_step(name)
        elif self._backward != engine.running_backward():
            self._backward = engine.running_backward()
            name = f"{type(optimizer).__name__} in a backward"
            engine.after_this_backward(lambda: self._end_step(name))

    def _end_step(self, name: str) -> None:
        """Note a step; those of hooks in one backward are one: their order may be another."""
        self._steps += 1
        digests = self._trained.digests()
        self._record.add(Step(self._steps, name, digests))
        if not self._has_trained:
            self._has_trained = self._trained.has_gradient() or self._has_moved(digests)
        requested = self._job.requested
        if requested is not None and requested.step == self._steps:
            torch.save(self._trained.tensors().get(requested.name), requested.path)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _has_moved(self, digests: dict[str, str]) -> bool:
        first = {k: v for k, v in (self._first_digests or {}).items() if k.startswith("parameter ")}
        return any(digests.get(name, digest) != digest for name, digest in first.items())


def _run_program(job: Job) -> tuple[int, Failure | None]:
    """Run a script as `python script arguments` would; return its exit code and its error."""
    sys.argv = [job.script, *job.arguments]
    sys.path.insert(0, os.fspath(Path(job.script).resolve().parent))
    try:
        runpy.run_path(job.script, run_name="__main__")
    except EnoughSteps:
        return 0, None
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None), None
    except Exception as error:
        return 1, _failure(error, job.script)
    return 0, None


def _failure(error: Exception, script: str) -> Failure:
    kind = type(error).__name__
    if isinstance(error, InfeasibleBudget):
        return Failure(kind, str(error), "budget", error.budget_bytes, error.minimum_bytes)
    exceeded = budget_exceeded(error, f"{kind}:") if is_refusal(error) else error
    if isinstance(exceeded, BudgetExceeded):
        numbers = exceeded.budget_bytes, exceeded.measured_bytes
        return Failure(kind, str(exceeded), "budget", *numbers)
    if isinstance(error, TightfitError):
        return Failure(kind, str(error), "program" if isinstance(error, CannotProve) else "step")
    return Failure(kind, explain_error(error, script).removeprefix(f"{kind}: "))


def _output(record_line: Callable[[str], None]) -> io.TextIOWrapper:
    """Return a standard output that hands on each line."""

    class Lines(io.RawIOBase):
        pending = b""

        def writable(self) -> bool:
            return True

        def write(self, text: Any) -> int:
            *lines, self.pending = (self.pending + bytes(text)).split(b"\n")
            for line in lines:
                record_line(line.decode(errors="replace"))
            return len(text)

        def close(self) -> None:
            if self.pending:
                record_line(self.pending.decode(errors="replace"))
                self.pending = b""
            super().close()

    return io.TextIOWrapper(
        io.BufferedWriter(Lines()), encoding="utf-8", line_buffering=True, write_through=True
    )


def _random_states() -> dict[str, str]:
    """Return hashes of the states of PyTorch's, Python's and NumPy's global generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda:{index}"] = state.tolist()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), rest)
    return {k: hashlib.blake2b(repr(v).encode()).hexdigest()[:32] for k, v in states.items()}


def main(path: str) -> None:
    """Run a job that is stored in a file."""
    _end_with_parent()
    job = msgspec.json.decode(Path(path).read_bytes(), type=Job)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    _Run(job).run()


def _end_with_parent() -> None:
    """Have Linux end this process with the one that started it, also if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _each_new_optimizer(call: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Return a context in which a function is called with each optimizer that is made."""
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        call(optimizer)

    return replaced(Optimizer, __init__=init)
