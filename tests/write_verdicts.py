"""Judge the contract's batteries and write what is not right into tests/contract/verdicts.json.

python tests/write_verdicts.py                      # both batteries, through `tightfit.fit`
python tests/write_verdicts.py outputs --door backend
python tests/write_verdicts.py outputs --only "f1:" --looks
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from support.contract.changes import judged_changes
from support.contract.doors import DOORS, Door, asked_door
from support.contract.every_case import CHANGES, OUTPUTS
from support.contract.outputs import judged
from support.contract.verdicts import RECORD, Outcome, Verdict

BATTERIES: dict[str, tuple[tuple[Any, ...], Callable[[Any, Door], Outcome]]] = {
    "outputs": (OUTPUTS, judged),
    "guards": (CHANGES, judged_changes),
}


def judge_all(battery: str, door: str, only: str) -> dict[str, Outcome]:
    """Judge the cases of a battery whose name holds a text; print each as it is known."""
    cases, judge = BATTERIES[battery]
    found = {}
    for case in cases:
        if only in case.name:
            began_s = time.perf_counter()
            found[case.name] = judge(case, DOORS[door])
            took_s = time.perf_counter() - began_s
            print(f"{took_s:5.1f} s  {case.name}: {found[case.name]}", flush=True)
    counts = Counter(outcome.verdict for outcome in found.values())
    listed = ", ".join(f"{counts[v]} {v.name.lower()}" for v in Verdict if counts[v])
    print(f"{battery} through {door}: {listed} of {len(found)}", flush=True)
    return found


def write(key: str, battery: str, found: dict[str, Outcome]) -> None:
    """Put what is not right into the record; cases that were not judged stay as they are."""
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    before = record.setdefault(key, {}).get(battery, {})
    after = {}
    for case in BATTERIES[battery][0]:
        if case.name not in found and case.name in before:
            after[case.name] = before[case.name]
        elif case.name in found and found[case.name].verdict is not Verdict.RIGHT:
            after[case.name] = str(found[case.name])
    record[key][battery] = after
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Judge and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("batteries", nargs="*", help=f"of {', '.join(BATTERIES)}; none: all")
    parser.add_argument("--door", choices=DOORS, default=asked_door())
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--looks", action="store_true", help="writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no collection after a case looks through what was imported
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TIGHTFIT_CACHE_DIR"] = folder
        for battery in options.batteries or BATTERIES:
            found = judge_all(battery, options.door, options.only)
            if not options.looks:
                write(options.door, battery, found)


if __name__ == "__main__":
    main()
