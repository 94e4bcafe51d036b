"""Tensors, errors and agreements between ranks."""
