"""A trainer's memory: recorded, predicted, and kept within a limit."""
