"""Architectures that ``autosplit.partition`` cuts, trained on ranks, against one process."""
