"""Ways to compute operators: the registry and one file for each operator family."""
