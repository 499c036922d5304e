"""What AOTAutograd's runtime wrapper of the installed PyTorch does, and its metadata."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit.capture.capture import capture
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private.wrappers import (
    OutputType,
    TensorAlias,
    facts_of,
    metadata_with,
    wrapped,
)


class Net(nn.Module):
    """Returns an output of each kind, and changes its input and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor, its detached alias, two views of another, an input and a view of it."""
        self.calls += 1
        x.mul_(2)
        z, inner = self.linear(x), self.linear(y)
        return z, z.detach(), inner[:2], inner.T, y, y[0]


def traced() -> JointGraph:
    x = torch.randn(4, 4, requires_grad=True) * 1
    net = Net()
    call = TracedCall(net.forward, {"net": net}, (x, torch.randn(4, 4)), {})
    return capture(call).joint


def test_the_metadata_of_a_trace_say_what_each_output_is() -> None:
    metadata = traced().metadata
    assert [info.output_type for info in metadata.output_info] == [
        OutputType.non_alias,
        OutputType.alias_of_intermediate_base_is_user_output,
        OutputType.alias_of_intermediate_save_as_output,
        OutputType.alias_of_intermediate,
        OutputType.is_input,
        OutputType.alias_of_input,
    ]
    assert [info.requires_grad for info in metadata.output_info] == [1, 0, 1, 1, 0, 0]
    # the buffer is changed inside of the program, the input after it: it has a history
    assert len(metadata.mutated_inp_runtime_indices) == 1
    assert metadata.num_intermediate_bases == 1


def test_plain_values_tell_all_of_the_metadata() -> None:
    metadata = traced().metadata
    facts = facts_of(metadata)
    assert facts_of(metadata_with(*facts)) == facts
    sequence = metadata_with(*facts).output_info[3].view_meta_sequence
    assert sequence is not None and len(sequence.sequence) > 0


def test_the_wrapper_makes_outputs_anew_and_changes_inputs() -> None:
    """It gives on what follows the inputs, and no mode watches its first call."""
    joint = traced()
    at = joint.metadata.mutated_inp_runtime_indices[0]
    inputs = [torch.randn(4, 4) for _ in joint.metadata.input_info]
    inputs[at] = torch.randn(4, 4, requires_grad=True) * 1
    watched = []

    def forward(given: list) -> list:
        *given, more = given
        watched.append((more, torch.utils._python_dispatch._get_current_dispatch_mode()))
        y = given[joint.metadata.output_info[4].base_idx]
        z, base = given[at] * 3, given[at] * 5
        alias = [TensorAlias(t) for t in (z, base[:2], base.T, y, y[0])]
        return [given[at] * 2, z, *alias, base]

    before = inputs[at].detach().clone()
    outputs = wrapped(forward, joint.metadata)([*inputs, "more"])
    assert watched == [("more", None)]
    z, detached, part, turned, y, first = outputs[:6]
    assert torch.equal(inputs[at], before * 2) and inputs[at].grad_fn is not None
    assert not detached.requires_grad and detached.data_ptr() == z.data_ptr()
    assert part._base is turned._base and part.requires_grad
    assert y is inputs[joint.metadata.output_info[4].base_idx] and first._base is not None
