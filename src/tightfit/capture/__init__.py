"""A step of a callable becomes a graph: traced, cleaned up, lifted to values and ops.

In: a `TracedCall` (a callable, its modules, its inputs). Out: a `Captured` step: the `Graph` that
is planned, and how each of its ops is run. Files stand on floors, the lowest first:

- `nodes`, `origins`: what an operator of a trace is, and where it comes from;
- `side_effects/`, `operators/`: what Python code does besides, what must be traced otherwise;
- `calls/`: how inputs and outputs nest, and what tells one call from another;
- `opaque/`, `decisions/`: modules that are one op, values that a forward reads;
- `joint_graph`, `traced_call`: what is traced, and the trace;
- `trace/`, `normalise/`, `probe`, `captured`: making the trace, cleaning it up, a real run;
- `lift` and `capture`: the way from a call to a captured step; `around_data` goes it again where
  data decides, `input_uses` with a gradient for each use of an input, and `partitioner` says what
  PyTorch itself would keep.

May import graph, plan, costs, allocator and torch_private.
"""
