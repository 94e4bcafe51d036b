"""One microbatch through a contender, action by action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from .contenders import Contender
from .models import Subject

ACTIONS = ("F", "I", "W")
Around = Callable[[str], AbstractContextManager[object]]


def microbatch(
    contender: Contender, subject: Subject, around: Around = lambda action: nullcontext()
) -> None:
    """F, I and W, each within what ``around`` gives for it. Leaves the gradients.

    The input and the gradient of the output are made inside, as if they had just been
    received, and results are dropped inside, as if they had been sent on.
    """
    with around("F"):
        contender.forward(subject.x.clone())
    with around("I"):
        contender.backward_input(subject.grad.clone())
    with around("W"):
        contender.backward_weight()
