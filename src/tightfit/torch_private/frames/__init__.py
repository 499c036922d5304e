"""What Dynamo finds of a frame, taken apart, and the same made of it again in another process."""
