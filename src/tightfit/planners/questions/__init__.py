"""Questions that are answered by asking planners, once or many times.

The least budget, why none fits, the largest batch, the curve over budgets, several planners side
by side; from graphs and budgets to a frozen answer each. The top floor: imports every planner.
"""
