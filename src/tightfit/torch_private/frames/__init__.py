"""How Dynamo follows a frame for us; what it found, taken apart, and the same made of it again."""
