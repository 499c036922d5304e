"""PyTorch's tracer, with the settings that it needs and corrections of its mistakes.

In: a `TracedCall`. Out: a `JointGraph` with true strides, or a `CaptureError` that names the module
and the way out. May import joint_graph, traced_call, the floors below them, and measuring of costs.
"""
