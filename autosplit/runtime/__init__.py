"""The callables F, I, W and B of one module, and their state."""
