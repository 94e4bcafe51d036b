"""Exact solvers: the yardsticks of both searches."""
