"""Parameters that were frozen while their gradients were pending."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor


@contextlib.contextmanager
def thawed(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters take gradients inside: autograd drops those of what does not require one, but the
    backward that these are from came before the freezing.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
