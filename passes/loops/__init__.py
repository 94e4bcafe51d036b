"""Unrolled loops, vectorized: their steps stacked into single operators."""
