"""Backends that turn a graph module into a callable: eager and Inductor."""
