"""Training inside a budget without a plan: for programs that no graph can hold."""

from __future__ import annotations

from typing import Literal

import torch

from tightfit.dynamic.pool import Candidates
from tightfit.dynamic.region import Online
from tightfit.errors import BadInput
from tightfit.eviction.policies.registry import policy_named
from tightfit.units import parse_bytes


def online(
    budget: int | str,
    *,
    policy: str = "improved_ancestors",
    smallest: int | str = "4KiB",
    search: Literal["sample", "all"] = "sample",
    most_again: float = 20.0,
    device: torch.device | str = "cpu",
    core: Literal["auto", "C++", "Python"] = "auto",
) -> Online:
    """Return a region in which any program in plain PyTorch keeps to a budget.

    ::

        with tightfit.online(budget="8GiB") as region:
            for x, y in batches:
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(region.report())

    Operators are recorded while they run. When memory is full, the tensors that are cheapest to
    compute again and longest unused lose their memory. They get it back when an operator reads them
    (Dynamic Tensor Rematerialization, Kirisame et al., ICLR 2021). Results are bitwise those of
    plain PyTorch. A model that `fit` can plan takes less time with a plan.

    Parameters
    ----------
    budget : int or str
        Bytes, or text such as ``"8GiB"``: for everything that PyTorch's CPU allocator gives out,
        the tensors that exist already and the workspace of operators included. On a GPU for bytes
        that PyTorch's allocator reserves there.
    policy : str
        The eviction policy: a name that ``tightfit simulate --policy`` knows, too.
    smallest : int or str
        Smaller storages are never evicted.
    search : str
        ``"all"`` scores every candidate at every eviction, ``"sample"`` as many as the square root
        of their number, at least 64.
    most_again : float
        Stop with an error when computing again has cost so many times the cost of the step itself.
    device : torch.device or str
        Where the budget counts, and memory is taken: the CPU, or a GPU such as ``"cuda"``. On a GPU
        nothing is called before a request is refused, so operators that are refused memory run
        again after memory was freed; the core in Python does that.
    core : str
        The core that intercepts operators: ``"C++"`` costs an operator least; where it is not
        compiled yet, entering waits half a minute for that. ``"Python"`` needs no compiler.
        ``"auto"`` takes C++ where it is compiled already, else Python, while another process
        compiles it for regions that begin later. The report says which it was.

    Raises
    ------
    BadInput
        If an argument is none of these, there is no such device, or a region is entered inside
        another.
    InfeasibleBudget
        On entering, if existing tensors do not fit; inside, if the program thrashes.
    BudgetExceeded
        Inside the region, by the operator that does not fit although all is evicted that may be;
        a smaller step may follow. At its end, if the program holds more than fits.
    HookUnavailable
        If the allocator hook cannot be installed.
    """
    if search not in ("sample", "all"):
        raise BadInput(f"search= is 'sample' or 'all', not {search!r}")
    if not most_again > 0:
        raise BadInput(f"most_again= must be positive, not {most_again!r}")
    if core not in ("auto", "C++", "Python"):
        raise BadInput(f"core= is 'auto', 'C++' or 'Python', not {core!r}")
    device = _device(device)
    if device.type == "cuda" and core == "C++":
        raise BadInput("core='C++' is for the CPU: leave it out on a GPU")
    return Online(
        parse_bytes(budget),
        policy_named(policy),
        Candidates(parse_bytes(smallest, what="smallest size"), are_all_scored=search == "all"),
        most_again=most_again,
        device=device,
        core=core,
    )


def _device(named: torch.device | str) -> torch.device:
    """Return a device with its index; a CPU has none."""
    device = torch.device(named)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BadInput(f"device= is the CPU or a CUDA device, not {named!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise BadInput(f"device={str(named)!r}: PyTorch sees {count} CUDA devices here")
    return torch.device("cuda", index)
