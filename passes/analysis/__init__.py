"""Analyses of a graph: operator classes, cost model, aliasing, symbolic sizes."""
