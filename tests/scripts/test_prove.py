"""Programs run twice, plain and fitted: what is found equal, and what is named where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit.cli import main
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.scripts import child, prove
from tightfit.scripts.prove import ScriptProof, prove_script
from tightfit.scripts.record import Ended, Failure, Generator, Line, Record, Step, differences

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = {"costs": "unit", "cache": False, "limits": (0.1, 0.01)}

START = """
import sys
import torch
import tightfit
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
torch.manual_seed(0)
QUICK = {"costs": "unit", "cache": False, "limits": (0.1, 0.01)}
def network(inputs, outputs):
    layers = nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, outputs)
    return nn.Sequential(*layers)
"""
LOOP = """
net = network(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(4):
    loss = net(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {number}: {loss.item()}")
"""
FAULT = """
def fault(optimizer, args, kwargs):
    fault.steps += 1
    if fault.steps == 2 and "forward" in vars(net):
        with torch.no_grad():
            net[3].bias += 0.25
fault.steps = 0
HOOK(fault)
"""
FAULTY = LOOP.replace("\nfor ", FAULT.replace("HOOK", "optimizer.register_step_post_hook") + "for ")
FAULTY_EVERYWHERE = FAULTY.replace("optimizer.register_step", "register_optimizer_step")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs here, without the seconds that a process takes to import PyTorch."""

    def run_here(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as around:
            around.setattr(sys, "argv", list(sys.argv))
            around.setattr(sys, "path", list(sys.path))
            torch.seed()  # as in a process of its own
            child.main(words[-1])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(prove.subprocess, "run", run_here)


@pytest.fixture
def proof_of(tmp_path: Path, in_this_process: None) -> Callable[..., ScriptProof]:
    """Return what proves a program given as text."""

    def proof(text: str, *arguments: str, **options: Any) -> ScriptProof:
        path = tmp_path / "train.py"
        path.write_text(START + text)
        return prove_script(str(path), arguments, **{"budget": "1MiB", **QUICK, **options})

    return proof


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("example", "fitted", "budget", "lines"),
    [
        ("train_over_trees.py", ("TreeCell", "Linear"), ("--budget", "64MiB"), 3),
        ("train_in_a_budget.py", ("Sequential",), (), 3),
        ("model_with_its_own_loss.py", ("LanguageModel",), ("--budget", "150MiB"), 3),
        ("two_models_one_budget.py", ("Sequential", "Sequential"), (), 1),
    ],
)
def test_examples_are_proven(
    example: str, fitted: tuple[str, ...], budget: tuple[str, ...], lines: int, capsys: Any
) -> None:
    assert main(["prove", str(EXAMPLES / example), *budget, "--costs", "unit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "proven" and found["steps"] == 3 and found["lines"] >= lines
    assert tuple(found["fitted"]) == fitted and found["difference"] is None
    assert found["measured_peak_bytes"] <= found["budget_bytes"]


@pytest.mark.usefixtures("in_this_process")
def test_a_file_of_a_factory_trains_nothing(capsys: Any) -> None:
    assert main(["prove", str(EXAMPLES / "llama7b.py"), "--budget", "1GiB"]) == 2
    assert "took no optimizer step" in capsys.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_a_planted_fault_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.py"
    path.write_text(START + FAULTY_EVERYWHERE)
    words = ["prove", str(path), "--budget", "1MiB", "--steps", "4", "--costs", "unit"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "NOT PROVEN: differs" in text
    assert "after step 2: of the plain and fitted run the parameter Sequential.3.bias" in text
    assert "by up to 0.25" in text


def test_models_with_optimizers_of_their_own_share_the_budget(proof_of: Any) -> None:
    text = """
import time
maker, critic = network(4, 8), network(8, 1)
optimizers = [torch.optim.Adam(m.parameters()) for m in (maker, critic)]
for number in range(int(sys.argv[1])):
    for optimizer, sign in zip(optimizers, (-1, 1)):
        made = maker(torch.randn(16, 4))
        loss = sign * (critic(made).mean() - critic(torch.randn(16, 8)).mean())
        loss.backward()
        optimizer.step()
        for each in optimizers:
            each.zero_grad()
    print("step", number)
    print("seconds", time.perf_counter())
"""
    proof = proof_of(text, "3", budget="8MiB", steps=5)
    assert proof.verdict == "proven" and proof.steps == 5
    assert (proof.lines, proof.left_out) == (2, 2)
    assert proof.fitted == ("Sequential", "Sequential") and proof.budget_bytes == 8 << 20


def test_memory_between_two_fitted_models_is_under_no_budget(proof_of: Any) -> None:
    """As when a program trains, reads a file and trains another model."""
    between = """
state = net.state_dict()
del net, optimizer, loss
torch.zeros(1 << 20)
"""
    proof = proof_of(LOOP + between + LOOP.replace("range(4)", "range(2)"), steps=6)
    assert proof.verdict == "proven" and proof.steps == 6
    assert proof.fitted == ("Sequential", "Sequential")
    assert proof.measured_peak_bytes is not None and proof.measured_peak_bytes < 1 << 20
    assert proof.eager_peak_bytes is not None and proof.eager_peak_bytes < 1 << 20


def test_memory_counts_from_when_the_optimizer_is_made(proof_of: Any) -> None:
    """The first batch counts as later ones do, although the first call fits the model."""
    text = """
net = network(256, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.zeros(1 << 20)
for number in range(3):
    batch = torch.stack([torch.randn(256) for _ in range(512)])
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    proof = proof_of(text, budget="8MiB", steps=3)
    assert proof.verdict == "proven" and proof.eager_peak_bytes is not None
    assert 3 * (512 << 10) < proof.eager_peak_bytes < 4 * (512 << 10)
    with pytest.raises(InfeasibleBudget) as refused:
        proof_of(text, budget="1200KiB", steps=3)
    assert proof_of(text, budget=refused.value.minimum_bytes, steps=3).verdict == "proven"


def test_weights_that_are_replaced_count_once(proof_of: Any) -> None:
    """As averaged weights are where a program sets `.data` to new tensors."""
    wide = LOOP.replace("network(8, 1)", "nn.Sequential(nn.Linear(8, 1 << 14))")
    replaced = wide + "    net[0].weight.data = net[0].weight.data * 0.5\n"
    weight_bytes = 8 << 16
    proof = proof_of(replaced.replace("randn(16", "randn(1"), budget="8MiB")
    assert proof.verdict == "proven" and proof.eager_peak_bytes is not None
    assert proof.eager_peak_bytes < 2.8 * weight_bytes  # weight and gradient, or two weights


def test_what_a_program_fits_itself_stays_plain_in_the_plain_run(proof_of: Any) -> None:
    text = """
net = network(8, 1)
optimizer = torch.optim.Adam(net.parameters())
def loss_of(x):
    return net(x).square().mean()
step = tightfit.step(loss_of, modules=[net], budget="2MiB", optimizer=optimizer, **QUICK)
print(tightfit.prepare(step, torch.randn(16, 8)).planned_peak_bytes)
for number in range(3):
    loss = step(torch.randn(16, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(tightfit.report(step))
"""
    proof = proof_of(text, budget=None)
    assert proof.verdict == "proven" and proof.fitted == ("loss_of",) and proof.lines == 3
    assert proof.budget_bytes == 2 << 20
    assert proof_of(text, budget="1MiB").budget_bytes == 1 << 20


@pytest.mark.parametrize("carried", ["z, z.detach()", "z.T, z.detach()"])
def test_a_program_is_proven_only_if_fit_trains_it_alike(proof_of: Any, carried: str) -> None:
    text = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        z = self.layer(x)
        return {carried}
net = Model()
if len(sys.argv) > 1:
    tightfit.fit(net, "1MiB", **QUICK)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 8)
for number in range(2):
    z, t = net(x)
    (z * t).sum().backward()
    optimizer.step()
    print(net.layer.weight.sum().item())
"""
    proof = proof_of(text)
    assert proof.verdict in ("proven", "differs")
    if proof.verdict == "differs":
        assert proof.difference.step == 1 and "Model.layer." in proof.difference.name
    assert proof_of(text, "fits", budget=None).verdict == proof.verdict


def test_a_program_that_differs_from_itself_is_not_the_plans_fault(proof_of: Any) -> None:
    proof = proof_of("torch.seed()" + LOOP)
    assert proof.verdict == "not deterministic" and proof.difference.step == 1
    later = "    if number == 2:\n        torch.seed()\n    loss = net"
    assert proof_of(LOOP.replace("    loss = net", later)).difference.step == 3
    faulty = proof_of(FAULTY.replace("    loss = net", later))
    assert faulty.verdict == "differs" and faulty.difference.step == 2


def test_a_program_that_moves_nothing_is_not_proven(proof_of: Any) -> None:
    assert proof_of(LOOP.replace("loss =", "loss = 0 *")).verdict == "nothing trained"


def test_a_module_that_is_called_in_a_way_of_its_own_is_fitted(proof_of: Any) -> None:
    called = """
class Called(nn.Module):
    def __call__(self, x):
        return self.forward(x) + 1
class Process(Called):
    def __init__(self):
        super().__init__()
        self.inner = network(8, 1)
    def forward(self, x):
        return self.inner(x)
"""
    proof = proof_of(called + LOOP.replace("network(8, 1)", "Process()"))
    assert proof.fitted == ("Process",)
    assert proof.verdict == "proven" and proof.holds
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


def test_modules_that_come_and_go_are_fitted_within_what_plain_pytorch_takes(
    proof_of: Any,
) -> None:
    """Federated averaging: a client that is gone counts no more, and its tensors have no names."""
    text = """
import copy
shared, kept = network(64, 8), []
for number in range(3):
    trials = [copy.deepcopy(shared) for _ in range(2)]
    with torch.no_grad():
        net = min(trials, key=lambda each: each(torch.ones(4, 64)).sum().item())
    del trials
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss = net(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    kept.append(copy.deepcopy(net.state_dict()))
    shared.load_state_dict(kept[-1])
"""
    roomy = proof_of(text, budget="64MiB", steps=6)
    assert roomy.verdict == "proven", roomy.difference
    tight = proof_of(text, budget=f"{roomy.eager_peak_bytes}B", steps=6)
    assert tight.verdict == "proven" and tight.holds, tight


def test_the_module_inside_a_wrapper_of_one_device_is_fitted(proof_of: Any) -> None:
    """Many public programs wrap their model for several GPUs, also where there is none."""
    proof = proof_of(LOOP.replace("optimizer =", "net = nn.DataParallel(net)\noptimizer ="))
    assert proof.fitted == ("Sequential",)
    assert proof.verdict == "proven" and proof.holds


def test_a_step_that_is_run_again_in_a_backward_is_no_module_of_the_program(proof_of: Any) -> None:
    """A penalty on a gradient, of a model with batch norm, whose buffers a second run copies."""
    proof = proof_of("""
net = network(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(3):
    x = torch.randn(16, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    loss = net(torch.randn(16, 8)).mean() + gradient.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
    assert proof.verdict == "proven", proof
    assert proof.fitted == ("Sequential",)


def test_a_wrapper_that_is_made_for_each_call_leaves_its_names(proof_of: Any) -> None:
    """Solvers of differential equations wrap what they are given. A fitted wrapper lives on."""
    text = LOOP.replace(
        "optimizer =",
        """class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)
optimizer =""",
    )
    proof = proof_of(text.replace("net(torch", "Wrapper(net)(torch"))
    assert proof.verdict == "proven", proof.difference
    assert {*proof.fitted} == {"Wrapper"}


def test_what_cannot_be_proven_is_said(proof_of: Any) -> None:
    with pytest.raises(BadInput, match="fits nothing itself: give a budget for its Sequential"):
        proof_of(LOOP, budget=None)
    with pytest.raises(BadInput, match="calls no module that could be fitted"):
        proof_of(
            "net = nn.Parameter(torch.ones(8))\n"
            "optimizer = torch.optim.SGD([net], lr=0.1)\n"
            "net.sum().backward()\n"
            "optimizer.step()\n"
        )
    sharded = 'type("FullyShardedDataParallel", (nn.Linear,), {})(8, 1)'
    with pytest.raises(BadInput, match="cannot be fitted: the model is wrapped by Fully"):
        proof_of(LOOP.replace("network(8, 1)", sharded))
    with pytest.raises(BadInput, match="without tightfit, too: ValueError: no more data"):
        proof_of(LOOP + "raise ValueError('no more data')", steps=9)
    own_error = "raise ValueError('fitted' if 'forward' in vars(net) else 'plain')"
    with pytest.raises(BadInput, match=r"too: ValueError: plain.* ends in another: .*: fitted"):
        proof_of(LOOP + own_error, steps=9)
    with pytest.raises(InfeasibleBudget):
        proof_of(LOOP, budget="1KiB")
    with pytest.raises(InfeasibleBudget, match="RuntimeError: tightfit: the budget of") as refused:
        proof_of(LOOP + "held = torch.zeros(4 << 20)", budget="8MiB", steps=9)
    assert 16 << 20 < (refused.value.minimum_bytes or 0) < 17 << 20
    assert "plain     PyTorch takes" in str(refused.value)
    with pytest.raises(BadInput, match=r"there is no script absent\.py"):
        prove_script("absent.py")


def test_where_two_records_differ(tmp_path: Path) -> None:
    end = Ended(code=0, trained=True, fitted=(), budget_bytes=None, peak_bytes=None, seconds=0.0)
    events = [Line("a"), Step(1, "SGD", {"x": "1", "y": "2"}), Generator("torch", "3"), end]
    others = [Line("b"), Step(1, "SGD", {"x": "1", "z": "2"}), Generator("torch", "4")]
    one, other = Record(tmp_path / "one"), Record(tmp_path / "other")
    for record, written in ((one, events), (other, others)):
        for event in written:
            record.add(event)
    assert not list(differences(one, one))
    found = list(differences(one, other))
    assert [d.kind for d in found] == ["line", "tensor", "generator", "order"]
    assert (found[1].name, found[1].others, found[1].step) == ("y", 1, 1)
    assert found[0].name == "'a' and 'b'" and "is over" in found[3].name


def test_a_run_that_failed_says_with_what(tmp_path: Path) -> None:
    failed = Ended(
        code=1,
        trained=True,
        fitted=(),
        budget_bytes=None,
        peak_bytes=None,
        seconds=0.0,
        failure=Failure("RuntimeError", "no room for a further 5 bytes"),
    )
    one, other = Record(tmp_path / "one"), Record(tmp_path / "other")
    for event in (Step(1, "SGD", {}), Step(2, "SGD", {})):
        one.add(event)
    for event in (Step(1, "SGD", {}), Generator("torch", ""), failed):
        other.add(event)
    (found,) = differences(one, other)
    said = "takes step 2 (SGD), the other one ends with RuntimeError: no room for a further 5 bytes"
    assert (found.kind, found.step, found.name) == ("order", 2, said)


def test_a_program_that_steps_in_backward_is_proven_without_gradients(
    proof_of: Callable[..., ScriptProof],
) -> None:
    fit = 'tightfit.fit(net, "1MiB", optimizer=optimizer, KEYWORD, **QUICK)'
    text = LOOP.replace("\nfor ", f"\n{fit}\nfor ", 1)
    proof = proof_of(text.replace("KEYWORD", "update_in_backward=True"), budget=None)
    assert proof.verdict == "proven", proof
    with pytest.raises(BadInput, match="clip_grad_norm"):
        proof_of(text.replace("KEYWORD", "clip_grad_norm=1.0"), budget=None)


def test_the_first_step_may_be_of_a_parameter_outside_of_modules(
    proof_of: Callable[..., ScriptProof],
) -> None:
    first = """
scale = torch.zeros(1, requires_grad=True)
other = torch.optim.SGD([scale], lr=0.1)
scale.exp().backward()
other.step()
"""
    proof = proof_of(LOOP.replace("\nfor ", f"{first}for ", 1), steps=3)
    assert (proof.verdict, proof.fitted) == ("proven", ("Sequential",)), proof


def test_steps_of_hooks_in_one_backward_are_one_step_in_any_order(
    proof_of: Callable[..., ScriptProof],
) -> None:
    hooks = """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for p in net.parameters():
    p.register_post_accumulate_grad_hook(step)
"""
    loop = LOOP.replace("    optimizer.step()\n    optimizer.zero_grad()\n", "")
    proof = proof_of(loop.replace("\nfor ", f"{hooks}for ", 1), steps=3)
    assert (proof.verdict, proof.steps) == ("proven", 3), proof


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end children so")
def test_a_killed_proof_leaves_no_process_behind(tmp_path: Path) -> None:
    script, noted = tmp_path / "sleeps.py", tmp_path / "process"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({os.fspath(noted)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    call = (
        f"from tightfit.cli import main; main(['prove', {os.fspath(script)!r}, '--budget', '1GiB'])"
    )
    proof = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.DEVNULL)
    _wait_until(lambda: noted.exists() and noted.read_text())
    proof.send_signal(signal.SIGKILL)
    proof.wait()
    _wait_until(lambda: not _runs(int(noted.read_text())))


def _wait_until(condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
