"""F, I, W and B of one module as callables, and the tensors that pass between them."""
