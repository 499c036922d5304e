"""``tightfit pack``: lay out the blocks of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tightfit.cli.options import Json, chosen_limits
from tightfit.cli.output import print_result
from tightfit.errors import BadInput
from tightfit.files import write_atomically
from tightfit.layout.blocks import CPU_ALIGNMENT_BYTES, Layout, Packed
from tightfit.layout.io import LAYOUT_SUFFIXES, load_blocks, save_layout
from tightfit.layout.pack import pack as pack_blocks
from tightfit.layout.packers.base import PackingLimits
from tightfit.layout.packers.registry import DEFAULT_PACKER
from tightfit.reporting.pictures.layout import Rectangle, layout_picture
from tightfit.reporting.pictures.page import SUFFIXES, require_pictures
from tightfit.units import format_bytes, format_seconds


def pack(
    trace: Path,
    /,
    *,
    method: str = DEFAULT_PACKER,
    time_limit: float = 5.0,
    alignment: int = CPU_ALIGNMENT_BYTES,
    seed: int = 0,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    picture: Path | None = None,
    json: Json = False,
) -> int:
    """Give every block of a trace an address, so that all fit in as few bytes as possible.

    ```sh
    tightfit pack blocks.csv -o placed.csv --picture placed.svg
    ```

    Parameters
    ----------
    trace
        Blocks: a .csv or .csv.gz file with the columns id, lower, upper, size, or .json.
    method
        Which packer: auto, paper, paper_area, paper_size, greedy_size, greedy_breadth, first_fit,
        portfolio, exact, squeaky_wheel, mip or cpsat.
    time_limit
        Seconds to search at most.
    alignment
        Bytes to which sizes are rounded up: 64 on a CPU, 512 on a GPU, 1 for none.
    seed
        Seed of every random choice.
    output
        Write the blocks with their offsets to this file (.csv, .csv.gz, .json or .json.gz).
    picture
        Draw the blocks as rectangles over time in this file (.svg, .png or .pdf).
    """
    limits = PackingLimits(seconds=chosen_limits(time_limit).seconds, seed=seed)
    _check_names(output, picture)
    packed = pack_blocks(load_blocks(trace), method, limits, alignment_bytes=alignment)
    if output is not None:
        save_layout(packed.layout, output)
    if picture is not None:
        title = f"{trace.name}: {packed.packer}"
        content = layout_picture(
            _rectangles(packed.layout),
            title=title,
            bound_bytes=packed.lower_bound_bytes,
            suffix=picture.suffix,
        )
        write_atomically(picture, content)
    return print_result(
        _text(packed),
        as_json=json,
        status="optimal" if packed.is_proven_optimal else "feasible",
        seconds=packed.seconds,
        height_bytes=packed.height_bytes,
        lower_bound_bytes=packed.lower_bound_bytes,
        ratio=packed.ratio,
        proven_optimal=packed.is_proven_optimal,
        proven_bytes=packed.proven_bytes,
        blocks=len(packed.layout.blocks),
        method=packed.packer,
    )


def _check_names(output: Path | None, picture: Path | None) -> None:
    """Refuse files by their names before any work is done for them."""
    if output is not None and not output.name.endswith(LAYOUT_SUFFIXES):
        raise BadInput(f"--output {str(output)!r} must end in {' or '.join(LAYOUT_SUFFIXES)}")
    if picture is not None:
        if picture.suffix not in SUFFIXES:
            raise BadInput(f"--picture {str(picture)!r} must end in {' or '.join(SUFFIXES)}")
        require_pictures()


def _rectangles(layout: Layout) -> list[Rectangle]:
    return [
        Rectangle(block.lower, block.upper, offset, block.rounded_bytes(layout.alignment_bytes))
        for block, offset in zip(layout.blocks, layout.offsets, strict=True)
    ]


def _text(packed: Packed) -> str:
    proven = "proven optimal" if packed.is_proven_optimal else "not proven optimal"
    return (
        f"{len(packed.layout.blocks)} blocks in {format_bytes(packed.height_bytes)}: "
        f"{packed.ratio:.4f} times the largest load of {format_bytes(packed.lower_bound_bytes)} "
        f"({proven}; {packed.packer}, {format_seconds(packed.seconds)})"
    )
