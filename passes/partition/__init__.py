"""Partition of the joint graph into F, I and W: reachability, minimum cut, extraction."""
