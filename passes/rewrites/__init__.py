"""Rewrites of the joint graph that let it be divided better."""
