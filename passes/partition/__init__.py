"""The joint graph divided into F, I and W: memory policy, minimum cut, extraction."""
