"""How W adds weight gradients: exact, fused and joined products, beside each other."""
