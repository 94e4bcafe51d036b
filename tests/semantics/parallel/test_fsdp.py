"""FSDP where parameters must be whole, or in a way that cannot be taken apart: refused, with advice
that works.
"""

from __future__ import annotations

from tests.ranks import Ranks
from tests.semantics.parallel.fsdp_workers import cases, findings

_SAID = {
    "offloaded": "called for FSDPModel with an offload policy",
    "graph breaks": "fsdp_workers.py",
    "in parts": "dynamic=True does not go with parameters that fully_shard has sharded",
    "sharded later, in parts": "dynamic=True does not go with",
}


def test_refused_by_name_with_advice_that_works(on_ranks: Ranks) -> None:
    for refusals, advised, trainer in on_ranks(findings, 2, timeout=100):
        assert len(refusals) == len([*cases()])
        for (sharding, way), text in refusals.items():
            said = "FSDP (fully_shard or FullyShardedDataParallel) manages"
            if "FSDP1" not in sharding:
                said = _SAID.get(way, said)
            assert said in text, (sharding, way, text)
            kind = "CaptureError" if way == "graph breaks" else "ShardedError"
            assert text.startswith(kind) or way == "compile", (sharding, way, text)
        assert "PipelineTrainer has no mesh with 'dp_shard': give it mesh=init_device" in trainer
        assert advised < 1e-6
