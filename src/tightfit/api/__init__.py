"""The public face: thin compositions of capture, costs, planners, plans and execution."""
