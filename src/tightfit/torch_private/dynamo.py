"""Dynamo compiles one callable, frame by frame, for tightfit's backend. Private names of torch.

Configuration is entered when Dynamo is asked about a frame, not in every call. Sizes stay static;
plain numbers that change become inputs, for Dynamo's knowledge of changes is kept by callable and
without sizes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._C._dynamo.guards import dict_version
from torch._dynamo import config, convert_frame, eval_frame, exc, pgo
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.variables import nn_module
from torch._guards import CompileContext, TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tightfit.errors import TightfitError
from tightfit.torch_private.frames.again import KeptFrames, ReusingConversion
from tightfit.torch_private.frames.ends import End, noting_ends
from tightfit.torch_private.frames.follower import Follower, Given
from tightfit.torch_private.frames.following import DerivativeOutside, following_for_plans
from tightfit.torch_private.frames.is_compiling import AnswerChanged, Answers
from tightfit.torch_private.frames.leaves import (
    HAS_LEAVES,
    ArgumentsKnown,
    as_leaves,
    asking,
    is_leaf_call,
    leaf_of,
    noted,
    run_leaf,
)
from tightfit.torch_private.frames.numpy import (
    NumpyFollowed,
    numbers_computed,
    without_numpy,
)
from tightfit.torch_private.frames.of_modules import (
    codes_of_forwards,
    is_behind_a_break,
    is_forward_of_pytorch,
    module_at,
    module_of_frame,
)
from tightfit.torch_private.frames.outermost import with_own_frame
from tightfit.torch_private.frames.recompiled import noting_failed_guards
from tightfit.torch_private.frames.skips import Skips
from tightfit.torch_private.frames.values import follows_values
from tightfit.torch_private.patches import Patch

__all__ = ["Given", "dict_version", "is_leaf_call", "leaf_of", "run_leaf"]

_OPTIONS = inspect.signature(eval_frame._optimize_catch_errors).parameters
_ISOLATED = {"isolate_recompiles": True} if "isolate_recompiles" in _OPTIONS else {}
"""From 2.13 on Dynamo keeps the graphs of each callable apart, even for the same code."""
_MOST_GRAPHS = 1024
_MOST_ALIKE = 4  # calls on the same sizes that make a graph of a frame: then Python runs it
_CONFIGURATION = {
    "skip_nnmodule_hook_guards": False,
    "optimize_ddp": False,
    "fail_on_recompile_limit_hit": True,
    "recompile_limit": _MOST_GRAPHS,
    "accumulated_recompile_limit": _MOST_GRAPHS,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": True,
    "allow_unspec_int_on_nn_module": True,
    "specialize_int": False,
    "specialize_float": False,
    "suppress_errors": False,
    "skip_tensor_guards_with_matching_dict_tags": False,  # both miss `requires_grad_()` on 2.11
    "use_recursive_dict_tags_for_guards": False,
    "skip_guards_on_constant_func_defaults": False,  # as from 2.13 on
    "use_numpy_random_stream": True,  # else its numbers come from PyTorch's generator
    "enable_dynamo_decompositions": False,  # with other rounding: `add_(x, alpha=2)` before 2.13
    "record_runtime_overhead": False,  # which costs as much as the guards of a small graph
}


def compiled(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    follower: Follower,
    kept: KeptFrames | None = None,
) -> Callable[..., Any]:
    """Return a callable that Dynamo compiles for a backend; everything stays where it is.

    `function`: to be compiled, in whichever file it is. `backend`: given a graph module and example
    inputs, returns a callable that runs the graph. `follower`: consulted while tracing. `kept`:
    results of other processes for frames.
    """
    first = ReusingConversion(without_numpy(backend), kept)
    converting = convert_frame.convert_frame(first.backend, Hooks())
    # as `optimize` does, which loads the tool that minimizes failing graphs
    context = eval_frame._optimize_catch_errors(converting, Hooks(), **_ISOLATED)
    outermost = with_own_frame(function)
    context.callback = per_frame = _PerFrame(context.callback, follower, first, outermost.__code__)
    for enter in context.enter_exit_hooks:  # their effects last; configuration is ours
        enter()()
    context.enter_exit_hooks[:] = [per_frame.skips.undo_marks]  # in every call
    return context(outermost)


class _EndsInside(BaseException):
    """Ends following: a graph would end inside a forward that may be one op."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.forward = forward


class _PerFrame:
    """A converter of frames between Dynamo and its own conversion."""

    def __init__(
        self, convert: Any, follower: Follower, first: ReusingConversion, outermost: types.CodeType
    ) -> None:
        self._torchdynamo_orig_backend = convert
        self._first = first
        self._outermost = outermost
        first.replace_converter(convert._torchdynamo_orig_backend)
        self._follower = follower
        self._followed: set[Any] = set()  # for they cannot be leaves
        self._changes: Any = defaultdict(pgo.CodeState)
        self._calls: defaultdict[Any, dict[int, Any]] = defaultdict(dict)  # sizes in each of them
        self._broken: set[types.CodeType] = set()  # code in which graphs have ended
        self.skips = Skips()

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        module = module_of_frame(frame)
        if module is not None and "forward" in frame.f_code.co_name:
            self._follower.entered_inner_frame()
        left_out = module in self._follower.left_out()
        is_left_out = left_out and frame.f_code is type(module).forward.__code__
        if is_left_out or _is_of_optimizer(frame):
            return ConvertFrameReturn(frame_exec_strategy=_AS_IT_IS, apply_to_code=False)
        owner = module if module is not None else module_at(frame)
        skipped = self.skips.find(frame.f_code, owner)
        if skipped is not None:
            return skipped
        result = self.skips.kept(frame.f_code, owner, self._result(frame, entry, state, module))
        if self._broken or result.guarded_code is None:  # so Python runs code inside of the frame
            forwards = codes_of_forwards(self._follower.modules())
            self.skips.undo_from_now_on({frame.f_code, *self._broken, *forwards})
        return result

    def _result(self, frame: Any, entry: Any, state: Any, module: nn.Module | None) -> Any:
        """Return the result for a frame: Dynamo's, or that it is left to Python."""
        number, given = self._follower.call()
        calls = self._calls[frame.f_code, _how_called(given, module)]
        calls[number] = _taken(frame)
        if len(calls) > _MOST_ALIKE:
            self._skipped(frame, "it is another graph in every call", None)
            if len({*calls.values()}) > 1:  # so it is of all that it calls: data decide sizes
                result = ConvertFrameReturn(frame_exec_strategy=_AS_IT_IS)
                return self.skips.kept(frame.f_code, None, result)  # for all modules of the class
            return ConvertFrameReturn()
        with self._follower.following():
            try:
                return self._looked_at(frame, entry, state)
            except DerivativeOutside as end:
                self._skipped(frame, end.reason, None)
                strategy = _AS_IT_IS if end.is_in_frame else _BY_PYTHON
                return ConvertFrameReturn(frame_exec_strategy=strategy)

    def _looked_at(self, frame: Any, entry: Any, state: Any) -> Any:
        """Return Dynamo's result for a frame; where it fails, that it is left to Python.

        Where data decide sizes inside a forward, it is tried whether the frame is one graph with
        that forward as one op.
        """
        numpy, asked, answers = True, None, Answers()
        while True:
            leaves = {f: g for f, g in self._follower.leaves().items() if f not in self._followed}
            leaves |= asking(asked)
            self._first.is_asked = not (leaves or self._followed or self._follower.left_out())
            failed: set[Any] = set()
            suppressed: list[str] = []
            ends: list[End] = []
            try:
                with (
                    _noting_suppressed(suppressed),
                    config.patch(trace_numpy=numpy),
                    numbers_computed(),
                    noting_ends(functools.partial(self._note_end, frame, ends, answers)),
                    answers.around(),
                ):
                    result = self._converted(frame, entry, state, noted(leaves, failed))
            except AnswerChanged:
                continue
            except _EndsInside as end:
                asked = end.forward
                continue
            except ArgumentsKnown as call:
                self._follower.try_as_one_op(call.forward, call.given)
                asked = None
                continue
            except (exc.FailOnRecompileLimitHit, TightfitError):
                raise
            except Exception as error:  # Dynamo's own: it wraps most of them, not all
                is_numpy = isinstance(getattr(error, "inner_exception", None), NumpyFollowed)
                if is_numpy and numpy:
                    numpy = False
                    continue
                if failed:
                    self._followed |= _RECURRENT if failed & _RECURRENT else failed
                    continue
                if answers.change(f"{type(error).__name__}: {error}"):
                    continue
                if eval_frame._get_error_on_graph_break():
                    raise
                reason = _OF_NUMPY if is_numpy else f"{type(error).__name__}: {error}"
                self._skipped(frame, reason, error)
                return ConvertFrameReturn(apply_to_code=False)  # another call may do
            if asked is not None:
                self._follower.try_as_one_op(asked, None)
                asked = None
                continue
            is_one = not self._is_outermost(frame) or _is_one_graph(result, ends)
            if not is_one and self._follower.follow_all_again():
                continue
            if answers.looks_at_data:
                self._follower.runs_as_compiled(answers.looks_at_data)
            self._note_if_skipped(frame, result, suppressed)
            return result

    def _note_if_skipped(self, frame: Any, result: Any, suppressed: list[str]) -> None:
        """Tell the follower if Dynamo leaves a frame to Python."""
        reason = getattr(result, "skip_reason", _SUPPRESSED if suppressed else _SKIPPED)
        if result.guarded_code is None and reason is not None:
            result.apply_to_code = reason != _SUPPRESSED
            self._skipped(frame, suppressed[0] if suppressed else reason, None)

    def _note_end(self, frame: Any, ends: list[End], answers: Answers, end: End) -> None:
        """Note the end of a graph.

        Raises `AnswerChanged` if code got the answer that it is not compiled, and its next
        operation ends the graph. Raises `_EndsInside` if the frame may be one graph, with a forward
        inside of it as one op.
        """
        if end.reason and answers.change(f"{end.reason} {end.frames}"):
            raise AnswerChanged
        self._follower.ended(end)
        ends.append(end)
        if end.reason:
            self._broken.update(TracingContext.get_traced_code() or ())
        if HAS_LEAVES and follows_values() and end.is_of_sizes and self._is_outermost(frame):
            forward = self._follower.one_op_at(end.frames[1:])
            if forward is not None:
                raise _EndsInside(forward)

    def _is_outermost(self, frame: Any) -> bool:
        return frame.f_code is self._outermost

    def _skipped(self, frame: Any, reason: str, error: Exception | None) -> None:
        """Tell of a frame that runs as plain Python, and of which module it is a forward."""
        self._follower.skipped(frame.f_code, module_at(frame), reason, error)

    def _converted(self, frame: Any, entry: Any, state: Any, leaves: Mapping[Any, Any]) -> Any:
        """Return Dynamo's result for a frame, in files that it skips, too."""
        convert = self._torchdynamo_orig_backend
        configuration = {**_CONFIGURATION, "allow_rnn": not _RECURRENT & self._followed}
        with (
            config.patch(configuration),
            self._own_changes(),
            self._unfollowed(leaves),
            following_for_plans(),
            noting_failed_guards(),
            _quiet(),
        ):
            if not is_forward_of_pytorch(frame.f_code):
                return convert(frame, entry, state)
            with convert_frame.compile_lock, _disable_current_modes():
                return convert._torchdynamo_orig_backend(frame, entry, convert.hooks, state)

    @contextlib.contextmanager
    def _unfollowed(self, leaves: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
        """Have Dynamo follow neither leaves nor modules that are left out.

        It asks whether a forward is to be followed only where it does not take a short way to it.
        """
        left_out = {type(module).forward for module in self._follower.left_out()}
        if not HAS_LEAVES:
            left_out |= leaves.keys() - _RECURRENT  # whose kernels are operators
            leaves = {}
        short_way = nn_module.unpatched_nn_module_call
        if leaves or left_out:
            nn_module.unpatched_nn_module_call = None
        for forward in left_out:
            forward._torchdynamo_disable = True
        try:
            with as_leaves(leaves):
                yield
        finally:
            nn_module.unpatched_nn_module_call = short_way
            for forward in left_out:
                del forward._torchdynamo_disable

    @contextlib.contextmanager
    def _own_changes(self) -> Iterator[None]:
        """Have Dynamo compare with inputs of this callable, sizes left out."""
        before, pgo._CODE_STATE = pgo._CODE_STATE, self._changes
        try:
            yield
        finally:
            pgo._CODE_STATE = before
            for seen in self._changes.values():
                for name, change in list(seen.automatic_dynamic.items()):
                    if isinstance(change.size, tuple):
                        del seen.automatic_dynamic[name]


def _is_one_graph(result: ConvertFrameReturn, ends: Sequence[End]) -> bool:
    """Whether all of a frame is one graph, or none is needed."""
    return result.guarded_code is not None and not any(end.reason for end in ends)


_RECURRENT: frozenset[Any] = frozenset({nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward})
"""Where one of them is followed all are: Dynamo knows one setting for them."""


@contextlib.contextmanager
def _noting_suppressed(reasons: list[str]) -> Iterator[None]:
    """Note the errors that Dynamo only logs where it leaves a frame to Python."""

    def noting(go_on: Any, error: Exception, *rest: Any) -> str:
        reasons.append(str(error))
        return go_on(error, *rest)

    with _FORMATTED_ERRORS.by(noting):
        yield


_FORMATTED_ERRORS = Patch(convert_frame, "format_error_msg")
_OF_NUMPY = "it computes with NumPy"
_SUPPRESSED = "an error was suppressed during compilation"
"""Dynamo's result for a frame that it cannot follow; the next call may be followed."""
_SKIPPED = "Dynamo skips it"  # it does not say why before 2.13
_AS_IT_IS = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
_BY_PYTHON = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)


def _how_called(given: Any, module: nn.Module | None) -> Any:
    """Return values that differ between calls that may well have graphs of their own."""
    training = module is not None and module.training
    return _sizes(given), training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def _taken(frame: Any) -> Any:
    """Return the sizes that a frame has; behind a break the integers, too: there data give them."""
    sizes = _sizes(frame.f_locals)
    if not is_behind_a_break(frame.f_code):
        return sizes
    return sizes, tuple(n for n in tree_leaves(frame.f_locals) if type(n) is int)


def _sizes(given: Any) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in tree_leaves(given) if isinstance(t, torch.Tensor))


_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


def _is_of_optimizer(frame: Any) -> bool:
    """Whether a frame is a method of an optimizer of PyTorch's, or what it wraps a step in."""
    if not frame.f_code.co_filename.startswith(_OPTIMIZERS):
        return False
    first = next(iter(frame.f_locals.values()), None)
    if isinstance(first, tuple) and frame.f_code.co_flags & inspect.CO_VARARGS:
        first = next(iter(first), None)
    return isinstance(first, torch.optim.Optimizer)


_NOISY = ("torch._dynamo.variables.tensor", "torch._dynamo.convert_frame")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dynamo's messages about breaks and itself: we announce breaks in our words."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def place_of_graph() -> str:
    """Return a digest of the code that Dynamo makes a graph of now; "" if it makes none."""
    made = CompileContext.current_compile_id()
    return "" if made is None or made.frame_id is None else f"frame {made.frame_id}"


def without_hooks(module: fx.GraphModule) -> fx.GraphModule:
    """Have neither a graph nor those inside it call the hooks of all modules; return it.

    Nor do they print their code where a request is refused in it.
    """
    for each in module.modules():
        if isinstance(each, fx.GraphModule):  # each has a class of its own
            kind: Any = type(each)
            kind.__call__ = _forward_of
            kind._wrapped_call = staticmethod(_forward_of)  # once its code is compiled again
    return module


def _forward_of(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def module_of(node: fx.Node) -> int | None:
    """Return the identity of the innermost module in whose forward a node was made."""
    stack = node.meta.get("nn_module_stack") or {}
    keys = [key.partition("@")[0] for key in stack]
    return int(keys[-1]) if keys and keys[-1].isdigit() else None


data_of = torch._C._autograd._get_data_attr
"""Returns a tensor's memory without its history, as ``.data`` does."""


def undone_assignment(node: fx.Node) -> list[fx.Node] | None:
    """Return an undo of the change that ``tensor.data = value`` counts as; None: it is not that.

    `node`: of a graph of Dynamo's, which makes ``set_`` of such an assignment; from PyTorch 2.14 on
    an operator of its own, that is not counted. There only inputs are recorded as before.
    """
    if node.op == "call_function" and node.target is _ASSIGNS_DATA:
        return [] if node.args[0].op == "placeholder" else None
    if node.op != "call_function" or node.target is not torch.Tensor.set_:
        return None
    lowering = [n for n in node.users if getattr(n.target, "__name__", "") == _LOWERING]
    return lowering if lowering and node.args == tuple(node.all_input_nodes) else None


_ASSIGNS_DATA = getattr(torch.ops.aten, "shallow_copy_data_", None)
_LOWERING = "_lower_version_count_by_1"


def is_limit_of_graphs(error: BaseException) -> bool:
    """Whether an error says that there are too many graphs of one frame."""
    return isinstance(error, exc.FailOnRecompileLimitHit)


def is_traced_meanwhile(error: BaseException) -> bool:
    """Whether an error says that something is traced, for which no thread may call Dynamo's code.

    Nothing of the call has run then.
    """
    return isinstance(error, RuntimeError) and str(error).startswith(_TRACED_MEANWHILE)


_TRACED_MEANWHILE = "Detected that you are using FX to symbolically trace"
