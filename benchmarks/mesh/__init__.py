"""Pipelines with replicas: gradients held against one process, and reductions hidden behind W."""
