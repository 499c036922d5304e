"""How Dynamo follows a frame for tightfit; its result, packed and unpacked again."""
