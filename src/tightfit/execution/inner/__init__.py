"""Outputs of a call that are computed from its other outputs.

They leave the call through autograd nodes of their own (`levels` says which), behind the outputs
that they are computed from. Their gradients go past these, into the backward program. Where one of
these outputs is looked at, by a hook or a derivative, the call runs again under autograd instead,
with that output in the place where it is made (`made_again`). `parts` decides which it is.
"""
