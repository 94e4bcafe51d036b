"""Check that a schedule is legal, draw its faults on a grid, and read and write torch's CSV
files.
"""
