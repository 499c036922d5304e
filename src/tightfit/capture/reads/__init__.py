"""What a forward reads from Python state: which code ran, what it can have read, the guard of it."""
