"""``SplitGraphCache``: split graphs on disk, by graph and environment."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch._inductor.config
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes import SplitGraphs
from autosplit.torch_internals.dtensor_facts import meshes_of
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten

from .alternatives import key_under, read_assumptions, with_assumptions
from .archive import NoArchiveError, Shardings, pack_graphs, unpack_graphs
from .argument_text import NoFingerprintError
from .environment_key import environment_lines
from .file_store import FileStore
from .fingerprint import fingerprint_lines
from .size_symbols import SizeSymbols

VARIABLE = "AUTOSPLIT_CACHE"
_NO_FORM = (NoArchiveError, NoFingerprintError)
_OFF = {"0", "off", "no", "false"}


@dataclasses.dataclass(frozen=True)
class PredictedResults:
    """The results of a module, predicted before its graph is traced.

    Attributes:
        names: paths of the leaves.
        leaves: tensors stand for those that it computes.
        spec: how the leaves make up the result.
    """

    names: tuple[str, ...]
    leaves: list[Any]
    spec: TreeSpec


@dataclasses.dataclass
class CacheEntry:
    """The place of one captured graph in the cache.

    What becomes of it is counted in ``torch._dynamo.utils.counters["autosplit"]``: ``graph_hit``,
    ``graph_miss``, and ``graph_bypass`` for a graph that will be made anew in every process.

    Attributes:
        store: where its file is.
        key: names the file; None where the graph cannot be told from others.
        meshes: those of the DTensors that the graph was captured for, which are in the key.
        symbols: sizes that the graph leaves open; None where it leaves none.
        assumed: whether the key is that of graphs whose assumptions of sizes are made already.
        outcome: what became of it, for the user.
        traced: keeps the call that it was captured for, given the key of its graphs and the sizes
            that they leave open; None where that is not to be kept, or is.
        why_traced: why it was captured although the graphs are kept.
    """

    store: FileStore
    key: str | None
    meshes: Sequence[Any] = ()
    symbols: SizeSymbols | None = None
    assumed: bool = False
    outcome: str = ""
    traced: Callable[[str, SizeSymbols | None], None] | None = None
    why_traced: str = ""
    _graphs: str = ""

    def find(self, mode: FakeTensorMode) -> tuple[SplitGraphs, Shardings] | None:
        """The graphs that were kept here, with values of a fake mode, and what of their inputs and
        results are DTensors.
        """
        if self.key is None:
            return None
        try:
            data = self._assuming(self.key)
            found = (data and unpack_graphs(data, mode, self.meshes, self.symbols)) or None
        except _NO_FORM:
            found = None
        counters["autosplit"]["graph_hit" if found else "graph_miss"] += 1
        self.outcome = "found" if found else "made"
        if found and self.why_traced:
            self.outcome += f"; traced to look it up ({self.why_traced})"
        if found and self.symbols is None:
            self.keep_call()
        return found

    def _assuming(self, key: str) -> bytes | None:
        """What is stored under a key; where sizes are left open, the first graphs whose assumptions
        of sizes hold here, which are assumed then.
        """
        data, self._graphs = self.store.read(key), key
        if self.symbols is None or self.assumed:
            return data
        for each in read_assumptions(data):
            if self.symbols.satisfy(each):
                self._graphs = key_under(key, each)
                kept = self.store.read(self._graphs)
                # What is assumed stays so: if the graphs are made, they are made for that.
                return kept if kept and self.symbols.assume(each) else None
        return None

    def keep(self, graphs: SplitGraphs, shardings: Shardings) -> None:
        """Store graphs, as they are before anything is compiled, and what of their inputs and
        results are DTensors.
        """
        if self.key is None:
            return
        try:
            data = pack_graphs(graphs, shardings, self.meshes, self.symbols)
            written = self._write(self.key, data)
        except _NO_FORM as reason:
            self.give_up(str(reason))
            return
        if self.symbols is None:
            self.keep_call()
        self.outcome = "made and kept" if written else "made; the folder cannot be written"

    def _write(self, key: str, data: bytes) -> bool:
        self._graphs = key
        if self.symbols is None:
            return self.store.write(key, data)
        made = self.symbols.assumed()
        self._graphs = key_under(key, made)
        written = self.store.write(self._graphs, data)
        return written and self.store.write(key, with_assumptions(self.store.read(key), made))

    def keep_call(self) -> None:
        """Store the call that the graphs were captured for, to be found untraced. Where sizes are
        left open, this is for the caller, once nothing more is assumed of them.
        """
        keep, self.traced = self.traced, None
        if keep is not None and self.key is not None:
            keep(self._graphs, self.symbols)

    def give_up(self, reason: str) -> None:
        """Keep nothing, as this graph could be taken for another or has no form on disk."""
        counters["autosplit"]["graph_bypass"] += 1
        self.key = self.traced = None
        self.outcome = f"made anew by every process ({reason})"


@dataclasses.dataclass(frozen=True)
class SplitGraphCache:
    """Split graphs on disk for one backend and memory setting.

    Attributes:
        store: where they are.
        options: all that the caller chose.
        exact: whether graphs that leave sizes open are found for the sizes of their example only.
    """

    store: FileStore
    options: tuple[str, ...]
    exact: bool = False

    @classmethod
    def open(cls, *options: str, exact: bool = False) -> SplitGraphCache | None:
        """The user's cache: beside Inductor's, or where ``AUTOSPLIT_CACHE`` says; None where that
        is ``0``, or where torch's caches are off.
        """
        chosen = os.environ.get(VARIABLE, "")
        if chosen.lower() in _OFF or torch._inductor.config.force_disable_caches:
            return None
        beside = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
        folder = pathlib.Path(chosen) if chosen else pathlib.Path(beside, "autosplit")
        return cls(FileStore(folder), options, exact)

    def entry(
        self,
        module: nn.Module,
        exported: fx.GraphModule,
        names: tuple[str, ...],
        inputs: tuple[Any, Any],
        results: PredictedResults,
        decompositions: Any,
    ) -> CacheEntry:
        """The place of a graph, by a digest of everything that the split graphs depend on.

        Args:
            module: that was captured.
            exported: Dynamo's graph of it.
            names: paths of the inputs, by which the graphs know them.
            inputs: args and kwargs that it was captured for.
            results: what it returns.
            decompositions: operators to trace through.
        """
        digest = hashlib.sha256()
        try:
            symbols = SizeSymbols(exported.meta["fake_mode"])
            for line in (
                *self.options,
                *environment_lines(decompositions),
                *map("takes {}".format, names),
                *map("returns {}".format, results.names),
                *symbols.lines(exact=self.exact),
                *fingerprint_lines(module, exported, *inputs, results.leaves, symbols),
            ):
                digest.update(f"{line}\n".encode())
        except NoFingerprintError as reason:
            return self.without_key(str(reason))
        values = (*tree_flatten(inputs)[0], *module.parameters(), *module.buffers())
        found = digest.hexdigest(), meshes_of(values), symbols or None
        return CacheEntry(self.store, *found)

    def without_key(self, reason: str) -> CacheEntry:
        """The place of a graph that is made anew by every process."""
        entry = CacheEntry(self.store, None)
        entry.give_up(reason)
        return entry
