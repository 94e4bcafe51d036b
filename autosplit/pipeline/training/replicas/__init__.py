"""Data-parallel replicas of a pipeline, and two copies of the stages on one."""
