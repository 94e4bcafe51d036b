"""Rewrites of the joint graph that expose weight gradients and shrink its boundaries."""
