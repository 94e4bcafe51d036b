"""Benchmarks. Each folder is one table: ``python -m benchmarks.FOLDER`` writes its README."""
