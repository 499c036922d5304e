"""Plans that other compilers execute: Inductor's partitioner and torchtitan's memory policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from tightfit.allocator import meter_for
from tightfit.errors import BadInput
from tightfit.integrations import inductor

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WIDTH, BATCH = 64, 1024
REMAT = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"
CLASSES = torch.arange(BATCH) % 8


def network(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 8))


def trained(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    torch.manual_seed(1)
    inputs = torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(call(inputs), CLASSES)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def peak_of(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> int:
    meter = meter_for("cpu")
    before = meter.live_bytes()
    meter.reset_peak()
    trained(model, call)
    return meter.peak_bytes() - before


def test_inductor_executes_the_plan_and_holds_less() -> None:
    plain = network()
    expected = trained(plain, plain)
    plain_bytes = peak_of(plain, plain)
    planned = network()
    with inductor.budget("2200KiB") as partitioner:
        compiled = torch.compile(planned)
        losses = trained(planned, compiled)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert max(partitioner.planned_peak_bytes) <= 2200 << 10
    assert peak_of(planned, compiled) < 0.8 * plain_bytes


def test_inductor_says_the_least_budget() -> None:
    model = network()
    with inductor.budget("500KiB"), pytest.raises(Exception, match=r"least +a plan fits \d+ bytes"):
        trained(model, torch.compile(model))


def joint_graph(model: nn.Module) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Trace forward, loss and backward into one graph, as torchtitan's trainer does."""
    parameters = dict(model.named_parameters())

    def step(values: list[torch.Tensor], inputs: torch.Tensor, classes: torch.Tensor):
        named = dict(zip(parameters, values, strict=True))
        loss = F.cross_entropy(torch.func.functional_call(model, named, (inputs,)), classes)
        setup_stacktrace_preservation_hooks([loss.grad_fn])  # they mark what backward runs
        return [loss, *torch.autograd.grad(loss, values)]

    values = list(parameters.values())
    inputs = torch.randn(BATCH, WIDTH)
    with preserve_node_meta():
        traced = make_fx(step, tracing_mode="fake")(values, inputs, CLASSES)
    return traced, [*values, inputs, CLASSES]


def test_torchtitan_executes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("torchtitan.experiments.graph_trainer.registry")
    remat = pytest.importorskip(REMAT)  # torchtitan's own copy of this pass needs Triton
    from tightfit.integrations import torchtitan

    policy = registry.MEMORY_POLICY_REGISTRY["tightfit"]
    assert policy is torchtitan.tag
    graph, given = joint_graph(network())
    expected = fx.Interpreter(graph).run(*given)
    monkeypatch.delenv("TIGHTFIT_BUDGET", raising=False)
    with pytest.raises(BadInput, match="TIGHTFIT_BUDGET"):
        policy(graph, config=None)
    monkeypatch.setenv("TIGHTFIT_BUDGET", "2200KiB")
    before = len(graph.graph.nodes)
    changed = remat.remat_using_tags_for_fwd_loss_bwd_graph(policy(graph, config=None))
    assert len(changed.graph.nodes) > before
    found = fx.Interpreter(changed).run(*given)
    assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))


def test_axolotl_takes_the_plugin() -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    from axolotl.utils.dict import DictDefault

    from tightfit.integrations.hugging_face import Budget

    manager = base.PluginManager.get_instance()
    manager.register("tightfit.integrations.axolotl.TightfitPlugin")
    assert "tightfit.integrations.axolotl.MemoryBudgetArgs" in manager.get_input_args()
    (callback,) = manager.add_callbacks_pre_trainer(DictDefault(memory_budget="8GiB"), None)
    assert isinstance(callback, Budget)
    with pytest.raises(BadInput, match="memory_budget: 8GiB"):
        manager.add_callbacks_pre_trainer(DictDefault(), None)
