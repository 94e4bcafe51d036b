"""The named schedules. Each is a pure function from counts to a Schedule."""
