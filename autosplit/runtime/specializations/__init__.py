"""The graphs of one module or stage for each kind of call."""
