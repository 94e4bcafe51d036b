"""Agreement on the parameters that ranks along "dp_shard" gather for an action.

The forward of one rank may call other blocks than that of its peers: a module that branches on a
size, a layer that is skipped on one replica. All-gathers of different blocks would be mixed up.

    rank 0    calls blocks 0 1 2    differs    gathers 0 1 2    runs 0 1 2    frees
    rank 1    calls blocks 0 2      differs    gathers 0 1 2    runs 0 2      frees
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from autosplit.errors import PipelineError
from autosplit.gathering import BlockGathers, Gathering
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.ranks.control import Control
from autosplit.trainer.batch_agreement import digest_of

_DIGEST_BITS = 47
_FORWARDS = ActionKind.FORWARD, ActionKind.RECOMPUTE


class GatherAgreement:
    """Compares the parameters that ranks gather for the calls of blocks, before each graph.

    Where they differ, each rank gathers all parameters of the stage for the graph, or instead of
    it, if the action runs no graph on this rank.

    Args:
        peers: control of the ranks that have the other shards of the same parameters.
    """

    def __init__(self, peers: Control) -> None:
        self._peers = peers
        self._action: Action | None = None
        self._remaining = 0  # comparisons in the action

    def connect(self, gathering: Gathering) -> None:
        """Let the graphs of a module gather what all ranks have agreed on."""
        gathering.agree = self._agree

    def compare_around(
        self, action: Action, gathering: Gathering, compute: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that runs an action and compares its gathers, equally often on all
        ranks.
        """
        return partial(self._run, action, gathering, compute)

    def _run(
        self, action: Action, gathering: Gathering, compute: Callable[..., Any], *args: Any
    ) -> Any:
        # B may run as one graph or as two, and other actions as one or none.
        self._action, self._remaining = action, 2 if action.kind is ActionKind.BACKWARD else 1
        try:
            results = compute(*args)
            while self._remaining:
                if not self._agree([]):
                    gathering.gather_all(is_forward=action.kind in _FORWARDS)
        finally:
            self._remaining = 0
        return results

    def _agree(self, gathers: BlockGathers) -> bool:
        """Return whether all ranks gather the same for a graph of the action; collective. Outside
        of actions, return True.

        Raises:
            LostPeerError: a rank did not take part.
            PipelineError: the ranks run actions of different stages.
        """
        action = self._action
        if action is None or not self._remaining:
            return True
        self._remaining -= 1
        number = action.stage << _DIGEST_BITS | digest_of(gathers)
        ones, zeros = self._peers.all_reduce_and(number, ~number)
        if (ones | zeros) >> _DIGEST_BITS != -1:
            raise PipelineError(
                f"{action} gathers parameters of stage {action.stage} for its blocks, and a rank "
                "that has the other shards runs another stage: their schedules differ. Pass "
                "microbatches of the same sizes on these ranks, or keep the parameters gathered "
                'for the step: StageOptions(sharding={"reshard_after_forward": False})'
            )
        return ones | zeros == -1
