"""Lowering of split graphs: accumulation, buffer reuse, code generation."""
