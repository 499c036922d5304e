"""PyTorch's tracer, with all that it must be told and all that it gets wrong.

In: a `TracedCall`. Out: a `JointGraph` with true strides, or a `CaptureError` that names the module
and the way out. May import joint_graph, traced_call, what is below them, and measuring of costs.
"""
