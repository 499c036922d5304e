"""The optimizer's step of each parameter as an op of a captured step.

`steps` places the steps. `second_pass` makes gradients again that were not kept until their steps
may be taken. `predicted` has the ops that name their memory themselves.
"""
