"""Schedules as pure data: actions, the dataflow, dependencies, sends."""
