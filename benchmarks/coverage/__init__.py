"""Which modules autosplit splits, compared with plain autograd on the same seed."""
