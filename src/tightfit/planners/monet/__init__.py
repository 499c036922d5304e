"""MONeT: checkpointing and implementations as one 0-1 program (Shah et al., ICLR 2021).

Equation numbers refer to that paper. Stages stand on backward ops: stage 0 is the forward pass,
stage k >= 1 recomputes forward nodes and then runs the k-th backward node in order of execution
(the paper counts them down). ``stored[k, v]`` is its s: value v is stored when stage k begins,
``recomputed[k, i]`` its r. The paper writes s^(k-1) both for the set before and after a stage;
its algorithm 2 is followed here: what stage k reads was stored before it or recomputed in it.
"""
