"""Fused against split backward, alternating within one run, on the same model and data."""
