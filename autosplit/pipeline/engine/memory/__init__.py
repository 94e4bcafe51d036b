"""Microbatches' state away from its rank: at a partner rank, or in the host's store."""
