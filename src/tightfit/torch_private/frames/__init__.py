"""How Dynamo follows frames where that is not as it does by itself."""
