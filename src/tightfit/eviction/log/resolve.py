"""A log without names: operators, tensors, storages, and the events of the replay in order.

Which tensor a name means never depends on evictions of a simulator. So it is settled here, once,
and the replayed log knows numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import (
    Backward,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    Mutate,
    Release,
)
from tightfit.eviction.log.reader import read_instructions


class Storage(NamedTuple):
    """Bytes; `root` is the tensor that was made together with them."""

    size_bytes: int
    root: int


class Tensor(NamedTuple):
    """A view of a storage, made by an operator; its root was made together with the storage."""

    name: str
    storage: int
    operator: int
    is_root: bool


class Operator(NamedTuple):
    """One call, pure: a tensor written in place counts as a new output."""

    name: str
    cost_ns: int
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]


class Event(IntEnum):
    """The event at one point of the replay."""

    CONSTANT = 0
    """An operator without cost makes a tensor that stays."""
    COMPUTE = 1
    """An operator runs for the first time."""
    HOLD = 2
    """The program holds a tensor once more."""
    RELEASE = 3
    """The program holds a tensor once less."""
    BACKWARD = 4
    """The backward pass begins."""


class Occurrence(NamedTuple):
    """An event, and the number of its operator or tensor."""

    event: Event
    number: int


@dataclass(frozen=True)
class Log:
    """A program as it is replayed; numbers are positions."""

    # storages, tensors, operators: in the order in which the program made them
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    occurrences: tuple[Occurrence, ...]  # events, in order
    # Tensors that the program still holds at its end, each as often as it has names, by the first
    # definitions of these names: its results
    held: tuple[int, ...]
    instructions: int  # lines of the text from START on: the measure of speed

    @cached_property
    def base_cost_ns(self) -> int:
        """Nanoseconds of all operators, each once."""
        return sum(operator.cost_ns for operator in self.operators)

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes of the tensors that exist before the program begins."""
        constants = (n for event, n in self.occurrences if event is Event.CONSTANT)
        return sum(self.new_bytes(self.operators[n]) for n in constants)

    @cached_property
    def bottleneck_bytes(self) -> int:
        """The most bytes that a call reads and makes; no budget below them can hold it."""
        return max(map(self._bytes_around, self.operators), default=0)

    @cached_property
    def base_peak_bytes(self) -> int:
        """The most bytes alive with nothing evicted, each storage until its last release."""
        live = most = 0
        holders = [0] * len(self.storages)
        for event, number in self.occurrences:
            if event in (Event.CONSTANT, Event.COMPUTE):
                operator = self.operators[number]
                live += self.new_bytes(operator)
                most = max(most, live)
                for tensor in operator.outputs:
                    holders[self.tensors[tensor].storage] += 1
            elif event is not Event.BACKWARD:
                storage = self.tensors[number].storage
                holders[storage] += 1 if event is Event.HOLD else -1
                if event is Event.RELEASE and holders[storage] == 0:
                    live -= self.storages[storage].size_bytes
        return most

    def new_bytes(self, operator: Operator) -> int:
        """Return the bytes of the storages that an operator makes."""
        return sum(self._own_bytes(tensor) for tensor in operator.outputs)

    def _own_bytes(self, tensor: int) -> int:
        """Bytes of a tensor's storage, none for a view."""
        made = self.tensors[tensor]
        return self.storages[made.storage].size_bytes if made.is_root else 0

    def _bytes_around(self, operator: Operator) -> int:
        return sum(map(self._own_bytes, (*operator.arguments, *operator.outputs)))


def load_log(path: Path | str) -> Log:
    """Return the program in a log file.

    Raises `BadInput` if the file is no log (`read_instructions`), has no operator, or releases a
    tensor more often than it is held.
    """
    return resolve(read_instructions(path), source=str(path))


def resolve(instructions: Iterable[Instruction], *, source: str = "the log") -> Log:
    """Return instructions with every name settled.

    `instructions`: as `read_instructions` yields them: names are defined once, before they are
    used. `source`: where they come from; named in errors.
    """
    resolver = _Resolver(source)
    for instruction in instructions:
        resolver.add(instruction)
    return resolver.log()


class _Resolver:
    """The tensors of the names so far, and the calls that were settled."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tensor_of: dict[str, int] = {}
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.occurrences: list[Occurrence] = []
        self.holders: list[int] = []
        self.instructions = 1

    def add(self, instruction: Instruction) -> None:
        self.instructions += 1
        match instruction:
            case Constant(name, size_bytes):
                self.instructions += 1
                operator = self._operator("constant", 0, (), Event.CONSTANT)
                self.tensor_of[name] = self._root(name, size_bytes, operator)
            case Call():
                self.instructions += 2 * len(instruction.results)
                self._call(instruction)
            case Mutate():
                self._mutate(instruction)
            case Copy(name, source):
                self.tensor_of[name] = self._hold(self.tensor_of[source])
            case CopyFrom(name, source):
                self._release(name)
                self.tensor_of[name] = self._hold(self.tensor_of[source])
            case Release(name):
                self._release(name)
            case Backward():
                self.occurrences.append(Occurrence(Event.BACKWARD, 0))

    def log(self) -> Log:
        if not any(event is Event.COMPUTE for event, _ in self.occurrences):
            raise BadInput(f"{self.source} has no operator call: there is nothing to replay")
        return Log(
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            operators=tuple(self.operators),
            occurrences=tuple(self.occurrences),
            held=tuple(t for t in self.tensor_of.values() if self.holders[t] > 0),
            instructions=self.instructions,
        )

    def _call(self, call: Call) -> None:
        arguments = tuple(self.tensor_of[name] for name in call.arguments)
        operator = self._operator(call.operator, call.time_ns, arguments, Event.COMPUTE)
        for result in call.results:
            if result.alias is None:
                tensor = self._root(result.name, result.size_bytes, operator)
            else:
                shared = self.tensors[arguments[result.alias]].storage
                tensor = self._tensor(Tensor(result.name, shared, operator, is_root=False))
            self.tensor_of[result.name] = tensor

    def _mutate(self, call: Mutate) -> None:
        """Write in place: a pure operator that makes new storages, then the names move there."""
        arguments = tuple(self.tensor_of[name] for name in call.arguments)
        operator = self._operator(call.operator, call.time_ns, arguments, Event.COMPUTE)
        overwritten = [self.tensors[arguments[position]] for position in call.mutated]
        made = [
            self._root(f"{old.name}$", self.storages[old.storage].size_bytes, operator)
            for old in overwritten
        ]
        for position, tensor in zip(call.mutated, made, strict=True):
            name = call.arguments[position]
            self._release(name)
            self.tensor_of[name] = tensor

    def _operator(self, name: str, cost_ns: int, arguments: tuple[int, ...], event: Event) -> int:
        self.operators.append(Operator(name, cost_ns, arguments, ()))
        self.occurrences.append(Occurrence(event, len(self.operators) - 1))
        return len(self.operators) - 1

    def _root(self, name: str, size_bytes: int, operator: int) -> int:
        self.storages.append(Storage(size_bytes, root=len(self.tensors)))
        return self._tensor(Tensor(name, len(self.storages) - 1, operator, is_root=True))

    def _tensor(self, tensor: Tensor) -> int:
        number = len(self.tensors)
        self.tensors.append(tensor)
        self.holders.append(1)
        made = self.operators[tensor.operator]
        self.operators[tensor.operator] = made._replace(outputs=(*made.outputs, number))
        return number

    def _hold(self, tensor: int) -> int:
        self.holders[tensor] += 1
        self.occurrences.append(Occurrence(Event.HOLD, tensor))
        return tensor

    def _release(self, name: str) -> None:
        tensor = self.tensor_of[name]
        if self.holders[tensor] == 0:
            raise BadInput(f"{self.source} releases {name!r} more often than it is held")
        self.holders[tensor] -= 1
        self.occurrences.append(Occurrence(Event.RELEASE, tensor))
