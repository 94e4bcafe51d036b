"""Layers that repeat themselves are traced by AOTAutograd a few times instead of all."""
