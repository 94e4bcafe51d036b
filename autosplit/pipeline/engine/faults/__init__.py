"""Failure detection: which rank failed first, died, left or hangs."""
