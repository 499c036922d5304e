"""A log in which views belong to their storage: no operators of their own, at no cost."""

from __future__ import annotations

from dataclasses import replace

from tightfit.eviction.log.resolve import Event, Log, Occurrence


def without_views(log: Log) -> Log:
    """Return a log whose every tensor is the root of its storage.

    An operator that makes views only never runs; to hold a view is to hold its storage.
    """

    def root(tensor: int) -> int:
        return log.storages[log.tensors[tensor].storage].root

    operators = tuple(
        operator._replace(
            arguments=tuple(map(root, operator.arguments)),
            outputs=tuple(t for t in operator.outputs if log.tensors[t].is_root),
        )
        for operator in log.operators
    )
    occurrences: list[Occurrence] = []
    for event, number in log.occurrences:
        if event in (Event.HOLD, Event.RELEASE):
            occurrences.append(Occurrence(event, root(number)))
            continue
        if event is not Event.COMPUTE:
            occurrences.append(Occurrence(event, number))
            continue
        made = log.operators[number].outputs
        views = [t for t in made if not log.tensors[t].is_root]
        if not made or len(views) < len(made):
            occurrences.append(Occurrence(event, number))
        occurrences += [Occurrence(Event.HOLD, root(view)) for view in views]
    return replace(
        log, operators=operators, occurrences=tuple(occurrences), held=tuple(map(root, log.held))
    )
