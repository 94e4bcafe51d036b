"""``PendingBound``: how many microbatches may be pending, and how many to compute."""

from __future__ import annotations

import dataclasses

from autosplit.errors import SplitError


@dataclasses.dataclass
class PendingBound:
    """Limit for the number of pending microbatches.

    Attributes:
        limit: the number of microbatches; ``math.inf`` for no limit.
        early: number of microbatches whose W ran because the limit was reached.

    Raises:
        SplitError: the limit is less than 1 or not a number.
    """

    limit: float = 1
    early: int = 0

    def __post_init__(self) -> None:
        if type(self.limit) not in (int, float) or not self.limit >= 1:
            raise SplitError(
                f"max_pending must be at least 1, or math.inf for no limit; got {self.limit!r}"
            )

    def text(self) -> list[str]:
        """Lines for a report on microbatches that were computed early; empty if the limit was never
        reached.
        """
        if not self.early:
            return []
        return [
            f"{self.early} microbatch(es) had their weight gradients computed by the next forward, "
            f"because at most {self.limit} may be pending; raise max_pending= to allow more."
        ]

    def check_request(self, microbatches: int, pending: int) -> int:
        """Return the requested number of microbatches to compute.

        Raises:
            SplitError: fewer microbatches than requested are pending.
        """
        if not isinstance(microbatches, int) or not 1 <= microbatches <= pending:
            advice = f"pass 1 to {pending}, or no number to compute all"
            if not pending:
                advice = (
                    "call loss.backward() first (each call is one pending microbatch); without a "
                    "number, backward_weight() computes all that are pending"
                )
            if self.early:
                advice += (
                    f". Because of max_pending={self.limit}, {self.early} microbatches were "
                    "computed before; raise max_pending= to keep more pending"
                )
            raise SplitError(
                f"backward_weight(microbatches={microbatches!r}), but microbatches pending: "
                f"{pending}; {advice}"
            )
        return microbatches
