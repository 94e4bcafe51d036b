"""Workarounds for operations that torch traces differently than it runs them, one a file."""
