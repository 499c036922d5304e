"""All cases of both batteries."""

from __future__ import annotations

from support.contract.aliases import ALIASES
from support.contract.backwards import BACKWARDS
from support.contract.between_steps import BETWEEN_STEPS
from support.contract.changes import ChangeCase
from support.contract.kinds import KINDS
from support.contract.mutations import MUTATIONS
from support.contract.outputs import OutputCase
from support.contract.shapes import SHAPES
from support.contract.shared_inputs import SHARED_INPUTS
from support.contract.surroundings import SURROUNDINGS

OUTPUTS: tuple[OutputCase, ...] = (
    *SHAPES,
    *ALIASES,
    *MUTATIONS,
    *SHARED_INPUTS,
    *KINDS,
    *BACKWARDS,
)

CHANGES: tuple[ChangeCase, ...] = (*BETWEEN_STEPS, *SURROUNDINGS)
