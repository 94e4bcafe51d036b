"""Runs a schedule: messages between ranks, faults, execution, processes."""
