"""Compare fused and split backwards, alternating within one run, on the same model and data."""
