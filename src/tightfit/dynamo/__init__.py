"""Dynamo follows the Python of a callable and hands over graphs, each of which is then planned.

The callable stays where it is. Frames that Dynamo leaves to Python run eagerly, and are reported.
"""
