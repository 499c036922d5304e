"""``tightfit record``: run a PyTorch program and record its operators."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tightfit.cli.options import Json
from tightfit.cli.output import print_result
from tightfit.errors import BadInput
from tightfit.eviction.log.resolve import resolve
from tightfit.eviction.log.writer import write_log
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.dynamic.recorder import Recorder


def record(
    script: Path,
    /,
    *arguments: str,
    output: Annotated[Path, Parameter(alias="-o")],
    step: int | None = None,
    json: Json = False,
) -> int:
    """Run a script and write its ops as an instruction log for `tightfit simulate`.

    ```sh
    tightfit record train.py --step 2 -o step.log.gz
    ```

    Parameters
    ----------
    script
        A Python program.
    arguments
        Arguments of the script.
    output
        The log; compressed if its name ends in .gz.
    step
        Record only forward and backward of this optimizer step, such as 2; by default, all.
    """
    from tightfit.dynamic.recorder import Recorder

    if not script.is_file():
        raise BadInput(f"there is no script {script}")
    if step is not None and step < 1:
        raise BadInput(f"--step {step}: optimizer steps count from 1")
    started = time.perf_counter()
    recorder = Recorder(step)
    _run(script, arguments, recorder)
    instructions = recorder.instructions()
    log = resolve(instructions)
    write_log(output, instructions)
    return print_result(
        f"wrote {output}: {len(log.operators)} operators and constants, "
        f"{format_bytes(log.base_peak_bytes)} at the peak, of it "
        f"{format_bytes(log.constant_bytes)} constants",
        as_json=json,
        status="ok",
        base_peak_bytes=log.base_peak_bytes,
        constant_bytes=log.constant_bytes,
        base_cost_ns=log.base_cost_ns,
        instructions=log.instructions,
        seconds=time.perf_counter() - started,
    )


def _run(script: Path, arguments: tuple[str, ...], recorder: Recorder) -> None:
    """Run a script as `python script arguments` would; objects it holds at its end stay alive."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [os.fspath(script), *arguments]
    sys.path.insert(0, os.fspath(script.resolve().parent))
    try:
        with recorder:
            kept = runpy.run_path(os.fspath(script), run_name="__main__")
        kept.clear()
    except SystemExit as ended:
        if ended.code:
            raise BadInput(f"{script} ended with code {ended.code}: nothing is written") from None
    finally:
        sys.argv, sys.path = before, path
