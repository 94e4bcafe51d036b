"""Checkpoints as files: written in one step, verified, read without running anything."""
