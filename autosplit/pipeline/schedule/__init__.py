"""Schedules as pure data: actions, what feeds what, dependencies, sends."""
