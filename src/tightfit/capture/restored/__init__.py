"""Side effects of code that runs only to be measured: noticed, and undone."""
