"""How a module is split and its graphs are run."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.backends.compiled_graph import check_backend, holds_open_sizes
from autosplit.errors import SplitError
from autosplit.mesh.costs import Overlap, passes_overlap
from autosplit.passes import Memory, PassError, memory_setting


@dataclass(frozen=True)
class SplitOptions:
    """What the passes and the backend are told; ``autosplit.split`` says what each means.

    Attributes:
        backend: how graphs are run.
        memory: what one microbatch holds, a setting or a budget in bytes.
        late_input: whether W does the whole backward where no input needs a gradient, see
            ``autosplit.Stage``.
        overlap: what weight gradients hide, and by which costs.

    Raises:
        SplitError: an unknown backend, memory setting or overlap; lists the known ones.
    """

    backend: str = "eager"
    memory: str | int = "balanced"
    late_input: bool = False
    overlap: Overlap = "collectives"

    def __post_init__(self) -> None:
        check_backend(self.backend)
        try:
            memory_setting(self.memory, overlap=passes_overlap(self.overlap))
        except PassError as error:
            raise SplitError(str(error)) from None

    @property
    def holds_open_sizes(self) -> bool:
        """Whether one graph may hold for many sizes of inputs."""
        return holds_open_sizes(self.backend)

    @property
    def memory_policy(self) -> Memory:
        """The memory setting as the passes take it."""
        overlap = passes_overlap(self.overlap)
        return memory_setting(self.memory, late_input=self.late_input, overlap=overlap)
