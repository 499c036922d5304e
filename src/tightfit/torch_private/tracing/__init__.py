"""How the tracer of operators runs for tightfit: results of fake kernels, walks over trees."""
