"""The processes of a run: launch, process groups, and the first error, which reaches all ranks."""
