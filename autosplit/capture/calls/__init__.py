"""Traced calls kept on disk with all that tracing read, so that another process need not trace."""
