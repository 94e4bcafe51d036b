"""Train a model that is cut into stages: modules, batches, gradients, optimizer, steps, plans."""
