"""Plans that also move values to far memory: which, when they leave, when they come back.

In: a task with far memory, and the default planner's plan without it. Out: an outcome at least as
good, with a bound that holds for every plan with moves in the same order. See docs/search.md,
"Far memory". May import the floors below, never torch.
"""
