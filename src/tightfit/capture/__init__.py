"""A step of a callable becomes a graph: traced, cleaned up, lifted to values and ops.

In: a `TracedCall` (a callable, its modules, its inputs). Out: a `Captured` step: the `Graph` that
is planned, and how each of its ops is run. Files belong to floors, the lowest first:

- `nodes`, `origins`: what an operator of a trace is, and where it comes from;
- `side_effects/`, `operators/`: what Python code does besides, what must be traced differently;
- `calls/`: how inputs and outputs nest, and what tells one call from another;
- `restored/`: what code that runs only to be measured changes, put back;
- `opaque/`, `decisions/`: modules that are one op, numbers that a forward reads;
- `joint_graph`, `traced_call`, `handed`: what is traced, the trace, graphs handed over;
- `trace/`, `normalise/`, `captured`: making the trace, cleaning it up, what comes of it;
- `recall/`, `stored`: the trace of a handed graph in a file;
- `lift` and `capture`: the way from a call to a captured step. `input_uses` does the same with a
  gradient for each use of an input, and `partitioner` says what PyTorch itself would keep.

No Python is followed here: another package does that and hands over graphs. `alone` lets one thread
at a time.

May import graph, plan, costs, allocator and torch_private.
"""
