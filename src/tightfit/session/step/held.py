"""The inputs of a call of a graph, as long as it may be run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import Any, Literal, TypeAlias

import torch

from tightfit.allocator import meter_for
from tightfit.allocator.tally import free_before_refusals
from tightfit.capture.handed import GraphArguments
from tightfit.execution.chain import made_by
from tightfit.execution.runtime import Run

Others: TypeAlias = Literal["none", "in case", "always"]
StandIn: TypeAlias = Callable[[Any, Run, int], Any]
"""A function of an input (None if it is gone), the call that made it, and the number of the output.

Returns a stand-in for the input; None: there is none."""


class HeldInputs:
    """The inputs of a call: each held, or referenced weakly, or made again by another call."""

    def __init__(self, given: GraphArguments) -> None:
        self._given: GraphArguments | None = given
        self._inputs: list[Any] = []
        self._places: list[int] = []
        self._written: Set[int] = frozenset()
        self._spec = given.spec
        self._makers: dict[int, tuple[weakref.ref[Run], int]] = {}
        self._only_in_case: set[int] = set()  # held for a repetition that may never come
        for place, x in enumerate(given.inputs):
            if getattr(x, "grad_fn", None) is not None and (made := made_by(x)) is not None:
                self._makers[place] = weakref.ref(made[0]), made[1]

    def hold_only(self, kept: Set[int], written: Set[int], others: Others) -> None:
        """Hold only some of the tensors among the inputs from now on.

        `kept`: the flattened inputs that the plan keeps. `written`: those that the call writes;
        they are not held, as their history may contain the call. `others`: whether to hold those
        that no call can make again: ``"none"``, all of them ``"always"``, or ``"in case"`` there is
        room.
        """
        given = self._split()
        planned = {self._places[leaf] for leaf in kept}
        self._written = {self._places[leaf] for leaf in written}
        tensors = {p for p in self._places if isinstance(given.inputs[p], torch.Tensor)}
        further = tensors - planned - self._makers.keys() if others != "none" else set[int]()
        own = (planned | further) - self._written
        self._only_in_case = further - self._written if others == "in case" else set()
        if self._only_in_case:
            _RETAINED.add(self)
        self._inputs = [
            weakref.ref(x) if isinstance(x, torch.Tensor) and place not in own else x
            for place, x in enumerate(given.inputs)
        ]

    def _split(self) -> GraphArguments:
        """Return all inputs; hold each by itself from now on."""
        given, self._given = self._given, None
        assert given is not None
        places = {id(x): place for place, x in enumerate(given.inputs)}
        self._places = [places[id(x)] for x in given.args]
        self._inputs = [*given.inputs]
        return given

    def hold_all(self) -> None:
        """Hold all inputs; those that other calls can make again only as long as there is room."""
        self._only_in_case = set()
        if self._given is None:
            for place in self._places:
                there = self._present_inputs()[place]
                if there is not None and place not in self._written:
                    self._inputs[place] = there
        if self._makers:
            _RETAINED.add(self)

    def release(self) -> None:
        """Free inputs that other calls promise to make again, or that are held just in case."""
        if self._given is not None:
            self._split()
        made_again = (p for p, (run, _) in self._makers.items() if _promises_outputs(run()))
        for place in (*made_again, *self._only_in_case):
            x = self._inputs[place]
            self._inputs[place] = weakref.ref(x) if isinstance(x, torch.Tensor) else x

    def promise(self) -> bool:
        """Hold all inputs from now on, but for those that other calls promise to make again.

        Return whether that can be: some may be gone.
        """
        if self._given is not None:
            return True
        there = self._present_inputs()
        for place in self._weak_places:
            made_again = place in self._makers and _promises_outputs(self._makers[place][0]())
            if there[place] is None and not made_again:
                return False
            if not made_again and place not in self._written:
                self._inputs[place] = there[place]
        self._only_in_case = set()
        return True

    def now(self, stand_in: StandIn = lambda given, run, output: None) -> GraphArguments | None:
        """Return the inputs, with stand-ins for outputs of other calls; None if any is gone."""
        inputs = self._present_inputs()
        for place, (reference, output) in self._makers.items():
            run = reference()
            other = stand_in(inputs[place], run, output) if run is not None else None
            inputs[place] = inputs[place] if other is None else other
        if self._given is not None:
            places = {id(x): place for place, x in enumerate(self._given.inputs)}
            args = tuple(inputs[places[id(x)]] for x in self._given.args)
        elif any(inputs[place] is None for place in self._weak_places):
            return None
        else:
            args = tuple(inputs[place] for place in self._places)
        return GraphArguments(args, {}, args, self._spec, tuple(inputs))

    @property
    def _weak_places(self) -> list[int]:
        return [place for place, x in enumerate(self._inputs) if isinstance(x, weakref.ref)]

    def _present_inputs(self) -> list[Any]:
        """Return the inputs, each None if it is gone."""
        if self._given is not None:
            return [*self._given.inputs]
        return [x() if isinstance(x, weakref.ref) else x for x in self._inputs]


def _promises_outputs(run: Run | None) -> bool:
    return run is not None and run.promises_outputs()


_RETAINED: weakref.WeakSet[HeldInputs] = weakref.WeakSet()
"""Inputs of calls that may be repeated: some can be made again, or may never be needed."""


def release_retained() -> None:
    """Free tensors that are held for further backwards and can be made again."""
    while _RETAINED:
        _RETAINED.pop().release()


def _free_retained(lacking_bytes: int, device: torch.device) -> int:
    """Free such tensors until so many bytes are free; return how many are."""
    meter = meter_for(device)
    before_bytes, freed_bytes = meter.live_bytes(), 0
    while _RETAINED and freed_bytes < lacking_bytes:
        _RETAINED.pop().release()
        freed_bytes = before_bytes - meter.live_bytes()
    return freed_bytes


free_before_refusals(_free_retained)
