"""The table of commands, and the handling of errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from tightfit.cli.cache import cache
from tightfit.cli.checks.check import check
from tightfit.cli.compare import compare_planners
from tightfit.cli.curve import curve
from tightfit.cli.demo import demo
from tightfit.cli.init import init
from tightfit.cli.max_batch import max_batch
from tightfit.cli.minimum import minimum
from tightfit.cli.output import BAD_INPUT, FITS, INFEASIBLE, print_error
from tightfit.cli.plan import plan
from tightfit.cli.profile_op import profile_op
from tightfit.cli.prove import prove
from tightfit.cli.recorded.pack import pack
from tightfit.cli.recorded.record import record
from tightfit.cli.recorded.simulate import simulate
from tightfit.cli.verify import verify
from tightfit.cli.views.report import report
from tightfit.cli.views.show import show
from tightfit.cli.views.snapshot import snapshot
from tightfit.errors import InfeasibleBudget, TightfitError
from tightfit.version import __version__

_FACTORY = (
    "A factory returns (model, loss, args, target). The model is an nn.Module. The loss is a "
    "function of (output, target), or None if the output is the loss or carries it as .loss. The "
    "args are a tuple of positional or a dict of keyword inputs. The target is handed to the "
    "loss, and may be None."
)
_EXIT_CODES = "Exit codes: 0 it fits, 3 it cannot fit, 2 bad input, 1 a proof failed."

app = App(
    name="tightfit",
    help=(
        "Train any PyTorch model inside a memory budget given in bytes.\n\n"
        "With a model of your own begin so: `tightfit init my_model.py`, put the model into that "
        "file, then `tightfit check my_model.py:make --budget-ratio 0.5`."
    ),
    help_epilogue=f"{_FACTORY}\n\n{_EXIT_CODES}",
    version=__version__,
)
_FIRST = Group("Your model", sort_key=1)
_PLANS = Group("Plans", sort_key=2)
_RECORDED = Group("Recorded programs", sort_key=3)
for command in (demo, init, check, report, prove, max_batch):
    app.command(command, group=_FIRST)
for command in (minimum, curve, plan):
    app.command(command, group=_PLANS)
for command in (show, verify, snapshot):
    app.command(command, group=_PLANS, help_epilogue=_EXIT_CODES)
app.command(cache)
app.command(compare_planners, name="compare", group=_PLANS)
app.command(profile_op, name="profile-op", group=_PLANS)
for command in (record, simulate, pack):
    app.command(command, group=_RECORDED, help_epilogue=_EXIT_CODES)
app.register_install_completion_command(
    help="Let Tab complete commands and options in this shell, from the next shell on."
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that tightfit raises on purpose become one message."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        ours = error.__cause__  # our own message about a value
        named = " ".join(("tightfit", *(error.command_chain or ())))
        text = str(ours) if isinstance(ours, TightfitError) else f"{error} (see {named} --help)"
        return print_error(text, as_json=as_json, code=BAD_INPUT)
    except InfeasibleBudget as error:
        return print_error(
            str(error),
            as_json=as_json,
            code=INFEASIBLE,
            status="infeasible",
            budget_bytes=error.budget_bytes,
            minimum_budget_bytes=error.minimum_bytes,
        )
    except TightfitError as error:
        return print_error(str(error), as_json=as_json, code=BAD_INPUT)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FITS
    return code or FITS
