"""Simulate steps: when results are computed, when they arrive, and how long they are kept."""
