"""What is said to ranks that were given the wrong batches."""

from __future__ import annotations

import itertools

import pytest

from autosplit.mesh.dimensions import Place, RankLayout
from autosplit.pipeline.training.agreement import _own_shares


@pytest.mark.parametrize(
    ("replicas", "shards", "said"),
    [
        (1, 1, ""),
        (2, 1, "rank=mesh.get_local_rank('dp_replicate')) does"),
        (1, 2, "rank=mesh.get_local_rank('dp_shard')) does"),
        (2, 2, "'dp_replicate') * mesh['dp_shard'].size() + mesh.get_local_rank('dp_shard')) does"),
    ],
)
def test_shares_are_along_the_dimensions_that_the_mesh_has(
    replicas: int, shards: int, said: str
) -> None:
    places = [Place(*at) for at in itertools.product(range(replicas), range(shards), range(2))]
    pipelines = tuple((rank,) for rank in range(len(places)))
    layout = RankLayout(pipelines, places=tuple(places), sharded=shards > 1)
    advice = _own_shares(layout)
    assert advice.endswith(said) if said else not advice
    assert ("dp_replicate" in advice, "dp_shard" in advice) == (replicas > 1, shards > 1)
