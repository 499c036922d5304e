"""From a module and example inputs to a graph, without running anything."""
