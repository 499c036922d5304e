"""Pictures that only benchmarks draw; their frame is that of `tightfit.reporting.pictures`."""
