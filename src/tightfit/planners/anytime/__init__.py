"""The default planner: a plan in milliseconds, then a better one and a proof, as time allows."""
