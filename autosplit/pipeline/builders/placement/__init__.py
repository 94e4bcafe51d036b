"""Where in a schedule what goes: weight gradients into waits, building blocks into slots."""
