"""The commands of the command line, as cyclopts knows them."""

from __future__ import annotations

from collections.abc import Iterator

from cyclopts import App

from tightfit.cli.app import app


def every_command() -> Iterator[tuple[str, App]]:
    for name in (name for name in app if not name.startswith("-")):
        if app[name].default_command is not None:
            yield name, app[name]
        else:
            inner = (inner for inner in app[name] if not inner.startswith("-"))
            yield from ((f"{name} {word}", app[name][word]) for word in inner)


def options_of(command: App) -> list[str]:
    """Return the names of what a command takes."""
    arguments = command.assemble_argument_collection()
    return sorted({name for argument in arguments for name in argument.names if name != "*"})
