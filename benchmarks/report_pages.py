"""Write reports, open each in a browser, look for faults, take the pictures of ``docs/report``.

    python benchmarks/report_pages.py

ResNet-50, GPT-2 and a chain of 625 layers, whose step has 5,000 ops. Each page is opened in
both themes and two widths: what it complains of, what it fetches and what is wider than the screen
ends the run. The table in ``docs/report.md`` is written from what was seen. Needs Chromium.
"""

from __future__ import annotations

import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from PIL import Image
from torch import nn

from benchmarks.documents import with_section
from support.browser import browser, opened
from tightfit.cli import main as tightfit
from tightfit.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "report"
PAGE = ROOT / "docs" / "report.md"
TARGETS = {
    "resnet50": ("ResNet-50", "zoo:resnet50"),
    "gpt2": ("GPT-2 small", "zoo:gpt2"),
    "5000-ops": ("A chain of 625 layers", f"{Path(__file__).resolve()}:chain"),
}
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1200, 390)]
LAYERS = 625  # of eight ops each
MOST_BYTES = 2_000_000
MOVES = 100

COUNTED = "({ops: facts.ops.target.length, again: facts.runs.again.filter(Boolean).length})"
MOVED = f"""(() => {{
  const began = performance.now();
  for (let i = 0; i < {MOVES}; i++) goTo(Math.floor(i * lastRun / {MOVES}));
  const spent = performance.now() - began;
  goTo(held.peak_run);
  return spent / {MOVES};
}})()"""


@dataclass(frozen=True)
class Seen:
    """A page: its ops, those computed again, its size, and the time to move to another instant."""

    name: str
    ops: int
    again: int
    size_bytes: int
    move_s: float


def chain(batch: int | None = None) -> tuple[Any, ...]:
    """Return a network of many small layers, as `tightfit report` takes a model."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(LAYERS)]
    inputs = torch.randn(batch or 256, 64)
    return nn.Sequential(*layers), nn.functional.mse_loss, (inputs,), torch.zeros_like(inputs)


def main() -> None:
    """Write, open and photograph every page; write the table."""
    rows: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder, browser() as running:
        for key, (name, target) in TARGETS.items():
            path = Path(folder) / f"{key}.html"
            words = ["report", target, "--budget-ratio", "0.5", "-o", str(path)]
            assert tightfit(words) == 0, words
            rows.append(look(running, path, key, name))
    write_atomically(PAGE, with_section(PAGE.read_text(), "pages", table(rows)).encode())


def look(running: Any, path: Path, key: str, name: str) -> Seen:
    """Open a page in both themes and widths and keep pictures of it; return what was seen."""
    found: dict[str, Any] = {}
    for scheme, width in LOOKS:
        with opened(running, path, scheme=scheme, width=width) as (page, errors):
            wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found = page.evaluate(COUNTED) | {"move": page.evaluate(MOVED)}
            assert not errors and wider <= 0, (key, scheme, width, list(errors), wider)
            save(photograph(page, width), PICTURES / f"{key}-{scheme}-{width}.png")
    size = path.stat().st_size
    assert size < MOST_BYTES, (key, size)
    return Seen(name, found["ops"], found["again"], size, found["move"] / 1000)


def photograph(page: Any, width: int) -> bytes:
    """Return a picture of the page from the top, on a phone from the chart, to the instant."""
    bottom = page.locator("#instant").bounding_box()
    top = 0 if width > 500 else page.locator("#memory-title").bounding_box()["y"] - 16
    height = bottom["y"] + bottom["height"] + 16 - top
    return page.screenshot(
        full_page=True, clip={"x": 0, "y": top, "width": width, "height": height}
    )


def save(png: bytes, path: Path) -> None:
    """Write a picture in few colours, which these pages have."""
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    few = picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    write_atomically(path, small.getvalue())


def table(rows: list[Seen]) -> str:
    """Return what was seen, as a table."""
    lines = [
        "| page | ops | computed again | size of the file | to another instant |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.name} | {row.ops:,} | {row.again:,} | {row.size_bytes / 1e6:.2f} MB "
        f"| {1000 * row.move_s:.1f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
