"""Compiled plans compute what plain PyTorch computes, up to rounding, inside the budget.

Inductor takes seconds for every graph, so most tests run the graphs it would be given operator by
operator: what is kept, recomputed, drawn and written is decided in them.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config

import tightfit
from api.test_bitwise import train_step
from support.features import SUPPORTED, UNCOMPILED
from support.models import CASES, OUTSIDE, Case
from support.recompute import recompute_at_random
from support.training import WAYS, Net
from tightfit.errors import BadInput, CompileError
from tightfit.execution.attach import attached
from tightfit.execution.compiled.program import compile_program
from tightfit.execution.compiled.tracing import trace_program
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.execution.trial import TrialPeaks, try_program
from tightfit.plan import assemble
from tightfit.plan.plan import Compute
from tightfit.session.whole.specialisation import Planned

aten = torch.ops.aten

OPTIONS: dict[str, Any] = {"costs": "unit", "compile": True, "limits": (1.0, 0.1)}


DRAWN_IN_ANOTHER_ORDER = {"BatchNorm of a transposed input"}
"""Where fused kernels lay a value out otherwise, dropout behind it meets elements otherwise."""

NEVER_TWICE = {"models that allow no single graph, part by part"}
"""Where every call has other graphs: a plan that runs once is not compiled."""


def interpreted(
    module: fx.GraphModule, *, backward: bool, donated: Sequence[int] = ()
) -> Callable[..., Sequence[Tensor]]:
    """Return a graph run operator by operator, in the place of Inductor.

    What it may write over it does write over, so that whoever still reads it gets other results.
    """

    def run(arguments: list[Tensor]) -> Sequence[Tensor]:
        given = [arguments[i] for i in donated]
        results = fx.Interpreter(module).boxed_run(arguments)
        returned = {x.untyped_storage().data_ptr() for x in results}
        for tensor in given:
            if tensor.untyped_storage().data_ptr() not in returned:
                tensor.zero_()
        return results

    return run


@pytest.fixture
def compiled_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled first counts as the fastest, operators one by one as the slowest."""
    monkeypatch.setattr(
        "tightfit.session.whole.compiling.time_programs",
        lambda _, programs, *__: range(len(programs)),
    )


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch, compiled_is_faster: None) -> None:
    """Graphs run operator by operator, and yet count as faster than plans that do."""
    monkeypatch.setattr("tightfit.torch_private.inductor.compile_graph", interpreted)


ROUNDING, HALF, TRAINED = 1e-5, 3e-2, 1e-3
"""What may differ, of the largest element: float32, bfloat16, after steps of an optimizer."""


def assert_close(mine: Iterable[Any], reference: Iterable[Any], tolerance: float) -> None:
    for a, b in zip(mine, reference, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            found, wanted = a.to_dense(), b.to_dense()
            scale = 1.0 + float(wanted.abs().max()) if wanted.numel() else 1.0
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale)


SOMEHOW_PLANNED = [case for case in (*CASES, *SUPPORTED) if case.where != OUTSIDE]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", SOMEHOW_PLANNED, ids=lambda case: case.name)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_every_recomputation_is_close_to_plain_pytorch(case: Case) -> None:
    torch.manual_seed(0)
    plain = case.model()
    torch.manual_seed(0)
    fitted = tightfit.fit(case.model(), "1GiB", **OPTIONS)
    inputs = case.inputs()
    own_inputs = copy.deepcopy(inputs)
    tolerance = HALF if case.autocast or "autocast" in case.name else ROUNDING
    if case.name in UNCOMPILED:
        with pytest.raises(CompileError, match=UNCOMPILED[case.name]):
            train_step(case, fitted, own_inputs, 0)
        return
    for step in range(4):
        if step == 2 and not tightfit.report(fitted).outside:
            break  # graphs of several run once with least memory: what follows them is unknown
        reference = train_step(case, plain, inputs, step)
        mine = train_step(case, fitted, own_inputs, step)
        if case.name in DRAWN_IN_ANOTHER_ORDER:
            assert torch.equal(mine[1], reference[1])  # the next random number
            return
        assert_close(mine, reference, tolerance)
    if case.name in NEVER_TWICE:
        return
    assert tightfit.report(fitted).compiled
    shape = attached(fitted).specialisations[-1]
    key, planned = list(shape.plans.items())[-1]
    captured = planned.runner.captured
    for seed in range(2):
        computes = recompute_at_random(planned.graph, random.Random(seed))
        plan = assemble(planned.graph, computes, budget_bytes=1 << 40)
        compiled = compile_program(captured, lower(captured, plan), 1 + 2 * seed)
        runner = Runner(captured, compiled)
        shape.add_plan(key, Planned(planned.graph, planned.outcome, runner))
        reference = train_step(case, plain, inputs, seed)
        assert_close(train_step(case, fitted, own_inputs, seed), reference, tolerance)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_every_way_of_training_is_close_to_plain_pytorch(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    reference = WAYS[name](plain, lambda each, optimizer: each)
    result = WAYS[name](
        model, lambda each, optimizer: tightfit.fit(each, "1GiB", optimizer=optimizer, **OPTIONS)
    )
    tolerance = HALF if "bfloat16" in name or "autocast" in name else TRAINED
    assert_close(result, reference, tolerance)
    assert_close(model.state_dict().values(), plain.state_dict().values(), tolerance)


def smallest_budget(model: nn.Module, inputs: tuple[Tensor, ...], optimizer: Any) -> int:
    """Return what the least-memory plan needs, as the fitted model plans it."""
    fitted = tightfit.fit(copy.deepcopy(model), "1GiB", optimizer=optimizer, **OPTIONS)
    return attached(fitted).smallest_budget(inputs, {}).found_bytes


class Small(nn.Module):
    """Two hidden layers, dropout and a BatchNorm: [N, 32] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return self.norm(self.b(self.dropout(torch.tanh(self.a(x))))).square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_is_faster")
def test_inductor_keeps_the_plan_the_budget_and_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fused kernels, among them dropout drawn again and statistics written once."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, inputs = Small(), (torch.randn(512, 32),)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(1.1 * smallest_budget(model, inputs, optimizer))
    case = Case("small", Small, lambda: inputs)
    expected = [train_step(case, plain, inputs, seed) for seed in range(2)]  # beyond the budget
    tightfit.fit(model, budget, optimizer=optimizer, **OPTIONS)
    quick = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    with inductor_config.patch(compile_threads=1, **quick):
        for seed in range(2):
            mine = train_step(case, model, inputs, seed)
            attached(model).close_step()
            assert_close(mine, expected[seed], ROUNDING)
    report = tightfit.report(model)
    assert report.compiled and report.overhead > 0
    assert report.measured is not None and report.measured.peak_bytes <= budget
    assert abs(report.measured.program_bytes - report.planned_peak_bytes) <= 0.01 * budget


@pytest.mark.usefixtures("without_inductor")
def test_what_a_plan_recomputes_stays_in_the_graphs() -> None:
    torch.manual_seed(0)
    model, inputs = Small(), (torch.randn(512, 32),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    least = int(1.01 * smallest_budget(model, inputs, optimizer))
    counts = []
    for budget in (least, 1 << 30):
        step = tightfit.fit(copy.deepcopy(model), budget, optimizer=optimizer, **OPTIONS)
        step(*inputs).backward()
        plan = tightfit.report(step).plan
        captured = attached(step).last.runner.captured
        traced = trace_program(captured, lower(captured, plan))
        graphs = (traced.forward.module, traced.backward)
        counts.append(sum(len(g.graph.nodes) for g in graphs))
        calls = Counter(n.target for g in graphs for n in g.graph.nodes)
        products = sum(calls[t] for t in (aten.mm.default, aten.addmm.default))
        planned = sum(
            captured.nodes[i.op].target in (aten.mm.default, aten.addmm.default)
            for i in plan.instructions
            if isinstance(i, Compute)
        )
        assert products == planned
    assert counts[0] > counts[1]


def test_exactness_says_what_compiling_does() -> None:
    model = nn.Linear(2, 2)
    tightfit.fit(model, "1GiB", compile=True, exactness="rounding")
    with pytest.raises(BadInput, match=r"'bitwise'.*compile=True.*'rounding'"):
        tightfit.fit(model, "1GiB", compile=True, exactness="bitwise")
    tightfit.fit(model, "1GiB", exactness="rounding")


@pytest.mark.usefixtures("without_inductor")
def test_a_budget_that_no_compiled_plan_holds_is_held_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each further try plans with a larger margin; the exact plan that runs in the end is said."""
    torch.manual_seed(0)
    model, inputs = Small(), (torch.randn(512, 32),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(1.5 * smallest_budget(model, inputs, optimizer))
    exceeding = TrialPeaks(2 * budget, 0, 0)
    monkeypatch.setattr("tightfit.session.whole.compile_trials.try_program", lambda *_: exceeding)
    tightfit.fit(model, budget, optimizer=optimizer, **OPTIONS)
    model(*inputs).backward()
    report = tightfit.report(model)
    assert not report.compiled and report.planned_peak_bytes <= budget
    assert "running operator by operator" in capsys.readouterr().err


@pytest.mark.usefixtures("without_inductor")
def test_what_is_measured_to_be_faster_operator_by_operator_runs_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays so when the surroundings of the step change a little: nothing is compiled again."""
    monkeypatch.setattr(
        "tightfit.session.whole.compiling.time_programs",
        lambda _, programs, *__: range(len(programs), 0, -1),
    )
    torch.manual_seed(0)
    model, inputs = Small(), (torch.randn(512, 32),)
    plain = copy.deepcopy(model)
    tightfit.fit(model, "1GiB", **OPTIONS)
    for seed in range(3):  # gradients that stay make a second plan
        for own in (model, plain):
            torch.manual_seed(seed)
            own(*inputs).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert not tightfit.report(model).compiled
    said = capsys.readouterr().err
    assert said.count("running operator by operator") == 2


@pytest.mark.usefixtures("without_inductor")
def test_tries_correct_themselves_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler that needs half of what operators need: the next plan may have twice as much."""

    def half(captured: Any, program: Any, inputs: Any, gradients: Any) -> TrialPeaks:
        peaks = try_program(captured, program, inputs, gradients)
        return TrialPeaks(
            peaks.forward_bytes // 2, peaks.boundary_bytes // 2, peaks.backward_bytes // 2
        )

    monkeypatch.setattr("tightfit.session.whole.compile_trials.try_program", half)
    monkeypatch.setattr(
        "tightfit.session.whole.compiling.time_programs",
        lambda _, programs, *__: [*range(len(programs) - 1, 0, -1), len(programs)],
    )
    torch.manual_seed(0)
    model, inputs = Small(), (torch.randn(512, 32),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(1.01 * smallest_budget(model, inputs, optimizer))
    tightfit.fit(model, budget, optimizer=optimizer, **OPTIONS)
    model(*inputs).backward()
    planned = attached(model).last
    assert planned.compiled_peak_bytes <= budget < planned.outcome.peak_bytes
    assert "try 2 of at most 3" in capsys.readouterr().err
