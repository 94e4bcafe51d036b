"""Effects of a forward besides its results: hooks, side effects, writes, random numbers."""
