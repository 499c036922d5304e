"""Commands that make a plan something to look at: a text, a page, a file for other viewers."""
