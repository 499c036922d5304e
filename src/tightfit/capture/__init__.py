"""A step of a callable becomes a graph: traced, cleaned up, lifted to values and ops.

In: a `TracedCall` (a callable, its modules, its inputs). Out: a `Captured` step: the `Graph` that
is planned, and how each of its ops is run. Files belong to floors, the lowest first:

- `nodes`, `origins`: facts about an operator of a trace, and where it comes from;
- `side_effects/`, `operators/`: effects of Python code, operators that need another trace;
- `calls/`: how inputs and outputs nest, and signatures of calls;
- `restored/`: undoing changes by code that runs only to be measured;
- `opaque/`, `decisions/`: modules that are one op, numbers that a forward reads;
- `joint_graph`, `traced_call`, `handed`: the trace, the traced call, graphs handed over;
- `trace/`, `normalise/`, `captured`: making the trace, cleaning it up, the result;
- `recall/`, `stored`: the trace of a handed graph in a file;
- `lift` and `capture`: the way from a call to a captured step. `input_uses` does the same with a
  gradient for each use of an input, and `partitioner` has the choice of PyTorch itself.

No Python is followed here: another package does that and hands over graphs. `alone` lets one thread
at a time.

May import graph, plan, costs, allocator and torch_private.
"""
