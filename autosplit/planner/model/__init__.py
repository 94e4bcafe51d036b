"""A captured model as a sequence of blocks, and its stages as modules."""
