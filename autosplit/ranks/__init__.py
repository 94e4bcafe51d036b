"""The processes of a run: launch, process groups, and how the first error of any reaches all."""
