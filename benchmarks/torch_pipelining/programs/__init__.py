"""The same training program for each contender, as a user writes it.

``prepare(task)`` builds stages and schedule and returns one step, forward and backward. The lines
in which a program differs from ``torch_eager`` are those that a user changes.
"""
