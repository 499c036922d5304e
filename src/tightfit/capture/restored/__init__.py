"""What code changes while it runs only to be measured: noticed, and put back."""
