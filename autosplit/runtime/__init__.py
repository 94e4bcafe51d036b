"""The callables of one module and their state."""
