"""All packers by name. A new packer is a file and a row here."""

from __future__ import annotations

from tightfit.layout.packers.base import Registration, core_packer
from tightfit.layout.packers.cpsat import pack_by_constraints
from tightfit.layout.packers.mip.packer import pack_by_program

DEFAULT_PACKER = "auto"

_PAPER = "Sekiyama et al. 2018 (arXiv 1804.10001)"

PACKERS: dict[str, Registration] = {
    "auto": Registration(
        pack=core_packer("auto"),
        summary="portfolio, then exact search and squeaky wheel in turns",
        is_exact=True,
    ),
    "paper": Registration(
        pack=core_packer("paper"),
        summary="best fit on offset lines, the longest lifetime first",
        reference=f"{_PAPER}, section 3.2",
    ),
    "paper_area": Registration(
        pack=core_packer("paper_area"),
        summary="the same, the largest size x lifetime first",
        reference=f"{_PAPER}, section 3.2; the key is ours",
    ),
    "paper_size": Registration(
        pack=core_packer("paper_size"),
        summary="the same, the largest size first",
        reference=f"{_PAPER}, section 3.2; the key is ours",
    ),
    "greedy_size": Registration(
        pack=core_packer("greedy_size"),
        summary="first fit, the largest first",
        reference="Pisarchyk and Lee 2020 (arXiv 2001.03288), greedy by size",
    ),
    "greedy_breadth": Registration(
        pack=core_packer("greedy_breadth"),
        summary="first fit, the blocks of the fullest time first",
        reference="Pisarchyk and Lee 2020 (arXiv 2001.03288), greedy by breadth",
    ),
    "first_fit": Registration(
        pack=core_packer("first_fit"), summary="first fit in the order of requests"
    ),
    "portfolio": Registration(
        pack=core_packer("portfolio"), summary="the best of thirteen constructive packers"
    ),
    "exact": Registration(
        pack=core_packer("exact"),
        summary="the portfolio, then exact search alone",
        is_exact=True,
        reference="Moffitt, MiniMalloc (ASPLOS 2023), with further bounds and orders",
    ),
    "squeaky_wheel": Registration(
        pack=core_packer("squeaky_wheel"),
        summary="the portfolio, then blocks without a place move forward in its order",
        reference="Joslin and Clements, JAIR 10 (1999)",
    ),
    "mip": Registration(
        pack=pack_by_program,
        summary="integer program on HiGHS, for few blocks",
        is_exact=True,
        reference=f"{_PAPER}, section 3.1",
    ),
    "cpsat": Registration(
        pack=pack_by_constraints,
        summary="rectangles that do not overlap, on CP-SAT, for few blocks",
        is_exact=True,
        extra="cpsat",
    ),
}
