"""Workarounds for what torch traces otherwise than it runs: in Dynamo, and by operator."""
