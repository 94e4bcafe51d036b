"""Blocks that a model has several of: each kind is captured once, and called by the others."""
