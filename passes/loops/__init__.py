"""Vectorization of unrolled loops: operators of all iterations as one batched operator."""
