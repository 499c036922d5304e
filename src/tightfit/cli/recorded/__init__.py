"""Commands on records of a program: its log of operators, its trace of blocks."""
