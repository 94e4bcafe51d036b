"""Divided graphs into what runs: in-place accumulation, donated memory, slices, source code."""
