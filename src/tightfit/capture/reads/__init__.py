"""What a forward reads from Python state and writes to it: found, guarded, put back."""
