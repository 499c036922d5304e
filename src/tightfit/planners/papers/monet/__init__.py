"""MONeT: checkpointing and implementations as one 0-1 program (Shah et al., ICLR 2021).

From a `Task` to the optimum of its search space, in the files that Checkmate has. Imports `stages`
and `solvers`. Equation numbers refer to the paper. Stages belong to backward ops. Stage 0 is the
forward pass, stage k >= 1 recomputes forward nodes and then runs the k-th backward node in order of
execution (the paper counts them down). The paper writes s^(k-1) both for the set before and after a
stage; its algorithm 2 is followed: inputs of stage k were stored before it or recomputed in it.
"""
