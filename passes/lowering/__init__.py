"""Lowering of split graphs: accumulation, buffer reuse, slices of W, code generation."""
