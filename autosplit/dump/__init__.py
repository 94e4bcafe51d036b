"""The graphs of a split module as tables, pictures and runnable files."""
