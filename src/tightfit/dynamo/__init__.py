"""Dynamo follows the Python of a callable and hands over graphs, each of which is then planned.

The callable stays where it is. What Dynamo leaves to Python runs eagerly, and is said.
"""
