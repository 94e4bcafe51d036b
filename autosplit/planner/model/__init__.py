"""A whole model as a line of blocks, and its stages as modules."""
