"""Ranks as processes of one machine: how they start, end and report."""
