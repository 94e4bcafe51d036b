"""Deferred weight gradients under autograd: pending queue, lazy gradients, delivery."""
