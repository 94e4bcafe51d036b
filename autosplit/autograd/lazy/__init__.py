"""Lazy gradients: tensors in ``.grad`` that run W when their values are first used."""
