"""Commands on what a program was seen to do: its log of operators, its trace of blocks."""
