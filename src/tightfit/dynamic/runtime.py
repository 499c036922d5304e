"""Dynamic tensor rematerialisation on plain tensors: every operator seen, memory taken when full.

Kirisame et al. (2021), sections 2 and 5, on unpatched PyTorch. A mode sees operators below
autograd, and the allocator asks for room when the budget is reached. Eviction takes the memory from
under a tensor, so that all its views and aliases lose and regain it together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from tightfit.allocator.refusals import is_refusal
from tightfit.dynamic.attempts import Attempts, Given, HasBegun
from tightfit.dynamic.contents import Contents, NotPlain, tensors_in
from tightfit.dynamic.core import Core
from tightfit.dynamic.draws import Drawn, Draws
from tightfit.dynamic.history import Content
from tightfit.dynamic.ledger import Ledger
from tightfit.dynamic.noted import Noted
from tightfit.dynamic.operators import Operator, operator_of
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.repeater import Repeater
from tightfit.dynamic.room import RetryingRoom, Room
from tightfit.dynamic.settled import Settled
from tightfit.torch_private import core as private
from tightfit.torch_private import engine
from tightfit.torch_private.storages import below_modes, free_failed_backward, storage_of

_FIXED_COST = 1000
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


class Runtime(Core, private.TorchDispatchMode):
    """Sees every operator; keeps the means to run it again.

    `pool`: contents that may be evicted.
    """

    name = "Python"

    def __init__(self, room: Room, pool: Pool, ledger: Ledger) -> None:
        super().__init__(room)
        self._pool = pool
        self._ledger = ledger
        self._repeater = Repeater(room, pool, ledger)
        self._contents = Contents(room, pool)
        self._settled = Settled(room, self._contents, pool, self._repeater)
        self._attempts = Attempts(room) if isinstance(room, RetryingRoom) else None
        self._draws = Draws(room)
        self._lock = threading.RLock()
        self._has_failed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # -- calls by others -------------------------------------------------------------------------

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    @property
    def room_maker(self) -> Callable[[int], bool]:
        return self.make_room

    def know(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._contents.mark_existing(storages)

    def make_room(self, lacking_bytes: int) -> bool:
        """Evict; runs inside the allocator, in any thread."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._contents.process_frees()
            return self._pool.free(lacking_bytes)
        finally:
            self._lock.release()

    def need(self, tensor: torch.Tensor, is_permanent: bool) -> None:
        content = self._contents.of_tensor(tensor)
        if content is None or (content.is_resident and not is_permanent):
            return
        with self._lock, below_modes():
            self._or_exceed(
                self._settled.settle if is_permanent else self._repeater.bring_back, content
            )
            self._pool.sweep()

    def resize(self, storage: torch.UntypedStorage, run: Callable[[], Any]) -> Any:
        content = self._contents.of_storage(storage)
        if content is None:
            return run()
        with self._lock, below_modes():
            self._or_exceed(self._settled.settle, content)
            self._or_exceed(lambda before: self._settled.protect_readers(before, storage), content)
            result = self._room.in_room(run)
            self._contents.put(storage, Content(storage.nbytes(), None))
            self._pool.sweep()
        return result

    def expect_writes(self, size_bytes: int) -> None:
        self._settled.expect_writes(size_bytes)

    def end_step(self) -> None:
        with self._lock, below_modes():
            self._contents.process_frees()
            for content in self._contents.computed():
                if content.is_resident and self._pool.is_small(content):
                    self._settled.settle(content)
        self._ledger.end_step()

    def settle_all(self) -> int:
        lost_bytes = 0
        with self._lock, below_modes():
            for content in self._contents.computed():
                if content.maker is not None:
                    content.maker.forget_reads()
            self._contents.process_frees()
            for content in self._contents.computed():
                try:
                    self._settled.settle(content)
                except RuntimeError as error:
                    if not is_refusal(error):
                        raise
                    lost_bytes += content.size_bytes
        return lost_bytes

    def clean_up_failed_backward(self) -> None:
        if self._has_failed and not engine.in_backward():
            self._has_failed = False
            self._room.in_room(free_failed_backward)

    def close(self) -> None:
        self.stop_watching()
        self._contents.close()

    def update_ledger(self) -> None:
        """Do nothing: the ledger is written all along."""

    def weights(self) -> tuple[int, int]:
        return self._contents.weights()

    @property
    def refused(self) -> str:
        return self._repeater.refused

    # -- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and not _PLAIN.issuperset(types):
            return NotImplemented  # a class has a rule of its own: inner operators come here
        operator = operator_of(func)
        if operator.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if operator.is_view:
            if args and type(args[0]) is torch.nn.Parameter:
                self._know(args[0])
            return func(*args, **kwargs)
        started = perf_counter_ns()
        if self._has_failed:
            self.clean_up_failed_backward()
        with self._lock:
            try:
                return self._run(func, operator, args, kwargs)
            except Exception as error:
                self._has_failed = True
                has_begun = isinstance(error, HasBegun)
                if not has_begun and not is_refusal(error):
                    raise
                raise self.exceeded(operator.name, has_begun=has_begun) from None
            finally:
                self._ledger.inside_since(started)

    def _run(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        self._contents.process_frees()
        try:
            overwritten = self._about_to_write(operator, args, kwargs)
            noted = Noted(self._contents, operator, args, kwargs, overwritten)
        except NotPlain:
            return self._run_outside(func, operator, args, kwargs)
        held = self._repeater.hold(noted.reads, noted.unread)
        try:
            drawn_from = self._draws.state_before(args, kwargs) if operator.draws else None
            if self._attempts is None:
                outputs = self._timed(func, args, kwargs)
            else:
                timed = partial(self._timed, func, args, kwargs)
                outputs = self._attempts.run(Given(operator, args, kwargs), timed, drawn_from)
            self._record(func, operator, noted, outputs, drawn_from)
        finally:
            held.release()
            self._pool.sweep()
        return outputs

    def _timed(self, func: Any, args: Any, kwargs: Any) -> Any:
        started = self._ledger.moment()
        self._lock.release()  # threads of the kernel may ask for room
        try:
            return func(*args, **kwargs)
        finally:
            self._lock.acquire()
            self._ledger.computed_since(started)

    def _record(
        self, func: Any, operator: Operator, noted: Noted, outputs: Any, drawn_from: Drawn | None
    ) -> None:
        """Remember how the results were computed, if that can be done again."""
        try:
            fresh = self._contents.new_among(outputs)
        except NotPlain:  # it may be a view of an argument
            self._settled.settle_all(noted.reads)
            return
        changed = [*noted.written, *fresh] if noted.written else fresh
        size_bytes = 0
        for content in noted.reads:
            size_bytes += content.size_bytes
        for storage in fresh:
            size_bytes += storage.nbytes()
        cost = _FIXED_COST + operator.weight * size_bytes
        self._ledger.ran_first(cost)
        if not changed:
            return
        with_grad = torch.is_grad_enabled()
        call = None
        if noted.repeats:
            if operator.takes_dtype and isinstance(outputs, torch.Tensor):
                noted.fix(outputs.dtype)
            call = noted.call(func, cost, drawn_from, with_grad)
        is_backward = not with_grad and engine.in_backward()
        now = self._ledger.clock, self._ledger.operators
        made = [Content(storage.nbytes(), call, is_backward, *now) for storage in changed]
        if operator.makes_blank:
            for content in made:
                content.is_blank = True
        if call is not None:
            call.made(made)
        put = self._contents.put_first if changed is fresh else self._contents.put
        for storage, content in zip(changed, made, strict=True):
            put(storage, content)

    def _run_outside(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors of another kind: its arguments stay."""
        tensors = private.pytree.tree_leaves((args, kwargs))
        known = [self._contents.of_tensor(t) for t in tensors if isinstance(t, torch.Tensor)]
        self._settled.settle_all([content for content in known if content is not None])
        for argument in operator.written:
            for tensor in tensors_in(argument.of(args, kwargs)):
                content = self._contents.of_tensor(tensor)
                if content is not None:
                    self._settled.protect_readers(content, storage_of(tensor))
        timed = partial(self._timed, func, args, kwargs)
        if self._attempts is None:
            return timed()
        return self._attempts.run(Given(operator, args, kwargs), timed)

    # -- contents --------------------------------------------------------------------------------

    def _know(self, parameter: torch.Tensor) -> None:
        """Keep a parameter, and its gradients as soon as they are accumulated."""
        if self.watches(parameter):
            return
        content, _ = self._contents.content_in(parameter)
        if content.is_blank:  # about to be initialised
            return
        self._settled.settle(content)
        self.watch(parameter)

    def _about_to_write(self, operator: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return contents that an operator overwrites; lost contents must not be needed again."""
        for value in args:
            if type(value) is torch.nn.Parameter:
                self._know(value)
        statistics = operator.statistics if operator.trains(args, kwargs) else ()
        arguments = (*operator.written, *statistics)
        if not arguments:
            return []
        for argument in statistics:
            for tensor in tensors_in(argument.of(args, kwargs)):
                self._settled.settle(self._contents.content_in(tensor)[0])
        tensors = [t for argument in arguments for t in tensors_in(argument.of(args, kwargs))]
        for tensor in tensors:
            content, storage = self._contents.content_in(tensor)
            if content.maker is None:
                self._settled.protect_readers(content, storage)
        return tensors

    # -- errors ------------------------------------------------------------------------------------

    def _or_exceed(self, function: Callable[[Content], None], content: Content) -> None:
        try:
            function(content)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            raise self.exceeded("bringing a tensor back") from None
