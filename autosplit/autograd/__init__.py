"""Deferred weight gradients under autograd: the queue of pending Ws, lazy gradients, and delivery
into ``.grad``.
"""
