"""Random operators whose result nobody reads."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch._inductor.config


def with_unused_draws() -> AbstractContextManager[None]:
    """Keep them while AOTAutograd traces: they move the generator, and without them all that is
    drawn later would differ from eager's for the same seed.
    """
    context: AbstractContextManager[None] = torch._inductor.config.patch(fallback_random=True)
    return context
