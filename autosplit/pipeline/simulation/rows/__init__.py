"""Rows of actions played without a graph, for searches that change them by a few."""
