"""Fused against split backward over two processes, and what splitting costs on one."""
