"""Training loops as people write them: plain PyTorch, and the lines of tightfit.

Each is one function of a `Run`, which stands for the two lines: `run.fit(model, ...)` is
`tightfit.fit(model, budget, ...)`, or nothing. A loop makes its own batches and keeps nothing
that such a program would not keep.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.training_loops.accelerated import (
    data_on_the_device,
    fused_steps,
    pinned_batches,
    prefetched_batches,
    restored,
    scaled_gradients,
    steps_in_backward,
)
from benchmarks.training_loops.adversarial import gan, gan_one_budget
from benchmarks.training_loops.around import data_parallel, trainer
from benchmarks.training_loops.deciding import mixture_of_experts, proximal_policy
from benchmarks.training_loops.drawn import drawn_loop
from benchmarks.training_loops.generative import diffusion, vector_quantised
from benchmarks.training_loops.graph_breaks import (
    adaptive_depth,
    branch_on_value,
    calls_summed,
    cleared_between,
    disabled_layer,
    early_stopping,
    function_in_break,
    gradients_summed,
    logged_values,
    lstm_logged,
    numpy_inside,
    outputs_kept,
    ragged_lists,
    routed_experts,
    second_model,
)
from benchmarks.training_loops.language import (
    evaluation_between_steps,
    logits_held,
    state_in_an_argument,
    state_in_an_attribute,
)
from benchmarks.training_loops.lifetimes import (
    autoencoder,
    batches_mixed,
    calls_without_backward,
    critic_outside,
    data_made_before,
    features_outside,
    gradients_cleared_late,
    inputs_perturbed,
    old_output_held,
    picture_trained,
    stepped_by_hooks,
    two_models_one_backward,
    weights_penalised,
    weights_penalised_in_place,
)
from benchmarks.training_loops.recurrences import limited_memory, state_space
from benchmarks.training_loops.run import Life, Run, live
from benchmarks.training_loops.vision import detector, two_views

__all__ = [
    "ACCELERATED",
    "IN_GRAPHS",
    "LIFETIMES",
    "LOOPS",
    "Life",
    "Loop",
    "Run",
    "live",
    "loop_named",
]


@dataclass(frozen=True)
class Loop:
    """A training loop, how many processes it takes, and which packages it needs."""

    function: Callable[[Run], None]
    ranks: int = 1
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called on the command line and in rows."""
        return self.function.__name__

    @property
    def title(self) -> str:
        """Its first line, without the full stop."""
        return (self.function.__doc__ or "").splitlines()[0].rstrip(".")


LOOPS: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(gan),
        Loop(gan_one_budget),
        Loop(diffusion),
        Loop(state_in_an_argument),
        Loop(state_in_an_attribute),
        Loop(vector_quantised),
        Loop(detector),
        Loop(mixture_of_experts),
        Loop(proximal_policy),
        Loop(limited_memory),
        Loop(state_space),
        Loop(data_parallel, ranks=2),
        Loop(evaluation_between_steps),
        Loop(trainer, packages=("transformers", "accelerate")),
        Loop(logits_held),
        Loop(two_views),
    )
}

ACCELERATED: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(scaled_gradients),
        Loop(fused_steps),
        Loop(pinned_batches),
        Loop(prefetched_batches),
        Loop(data_on_the_device),
        Loop(steps_in_backward),
        Loop(restored),
    )
}

LIFETIMES: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(old_output_held),
        Loop(gradients_cleared_late),
        Loop(features_outside),
        Loop(picture_trained),
        Loop(calls_without_backward),
        Loop(critic_outside),
        Loop(data_made_before),
        Loop(two_models_one_backward),
        Loop(batches_mixed),
        Loop(inputs_perturbed),
        Loop(stepped_by_hooks),
        Loop(weights_penalised),
        Loop(weights_penalised_in_place),
        Loop(autoencoder),
    )
}
"""Small loops that differ in what lives from one call to the next; for `benchmarks/advice.py`."""

IN_GRAPHS: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(adaptive_depth),
        Loop(branch_on_value),
        Loop(calls_summed),
        Loop(cleared_between),
        Loop(disabled_layer),
        Loop(early_stopping),
        Loop(function_in_break),
        Loop(gradients_summed),
        Loop(logged_values),
        Loop(lstm_logged),
        Loop(numpy_inside),
        Loop(outputs_kept),
        Loop(ragged_lists),
        Loop(routed_experts),
        Loop(second_model),
    )
}
"""Loops whose models Dynamo breaks into several graphs; for `benchmarks/advice.py`."""

_DRAWN, _DRAWN_IN_GRAPHS = "drawn_", "drawn_in_graphs_"


def loop_named(name: str) -> Loop:
    """Return the loop of a name; ``drawn_7`` is the one that is drawn at random by the seed 7.

    ``drawn_in_graphs_7`` is the same, with a model that Dynamo breaks into several graphs.
    """
    if name.startswith(_DRAWN_IN_GRAPHS):
        seed = int(name.removeprefix(_DRAWN_IN_GRAPHS))
        return Loop(drawn_loop(seed, breaks=True)[1])
    if name.startswith(_DRAWN):
        return Loop(drawn_loop(int(name.removeprefix(_DRAWN)))[1])
    return {**ACCELERATED, **IN_GRAPHS, **LIFETIMES, **LOOPS}[name]
