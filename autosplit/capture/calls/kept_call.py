"""``KeptCall``: a call's place on disk, with what is to be known to use its graphs untraced."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch._dynamo.utils import counters

from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.capture.cache.file_store import FileStore
from autosplit.torch_internals.pytree import TreeSpec

from .call_errors import OtherwiseError
from .call_file import CallForm, Told, read_forms, with_form
from .object_text import ObjectTexts
from .result_forms import read_spec, write_spec

if TYPE_CHECKING:
    from autosplit.capture.cache.size_symbols import SizeSymbols

    from .kept_guards import KeptGuards, SettledSizes


@dataclasses.dataclass(frozen=True)
class FoundCall:
    """What is known of a call that was traced before.

    Attributes:
        graphs: key of its graphs.
        names: paths of the leaves of its result.
        spec: how the leaves make up the result.
        manager: Dynamo's guards over the objects of this process.
        kept: must live as long as they.
        open_sizes: fake mode of the graphs, and sizes that they leave open; None where all of the
            graphs' sizes are known.
        places: number of such a size -> where the inputs say it.
    """

    graphs: str
    names: tuple[str, ...]
    spec: TreeSpec
    manager: Any
    kept: Any
    open_sizes: SettledSizes | None = None
    places: Mapping[int, tuple[int, str, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RefusedCall:
    """A call that an earlier process traced in vain; one after it can be captured.

    Attributes:
        message: why this one cannot.
    """

    message: str


@dataclasses.dataclass
class KeptCall:
    """A call that is about to be traced, or was.

    Under one key may be several, as a model's first call and those after it: attributes of objects
    that hang on the module are in no key, only guards read them.

    What becomes of it is counted in ``torch._dynamo.utils.counters["autosplit"]``: ``call_hit``,
    ``call_miss``, and ``call_bypass`` for one that every process traces.

    Attributes:
        store: where its file is.
        texts: of the objects in its key.
        key: names the file; None where the call cannot be told from others untraced.
        reason: why it is traced.
        open_sizes: whether sizes are to be left open.
    """

    store: FileStore
    texts: ObjectTexts
    key: str | None = None
    reason: str = ""
    open_sizes: bool = False
    _guards: KeptGuards | None = None
    _captured: Any = None
    _told: tuple[Told, ...] = ()

    @classmethod
    def of(
        cls,
        store: FileStore,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        environment: Iterable[str],
        open_sizes: bool = False,
    ) -> KeptCall:
        """The place of a call.

        Args:
            store: of graphs and calls.
            module: that is called.
            args: positional inputs.
            kwargs: keyword inputs.
            environment: lines of the key that are not the call's.
            open_sizes: whether sizes are to be left open.
        """
        made = cls(store, ObjectTexts(), open_sizes=open_sizes)
        digest = hashlib.sha256(b"call\n")
        try:
            # What they import is not in every version of torch.
            from .call_key import call_lines

            for line in environment:
                digest.update(f"{line}\n".encode())
            for line in call_lines(module, args, kwargs, made.texts):
                digest.update(f"{line}\n".encode())
        except Exception as error:  # other versions of torch, or what strange objects raise
            made.give_up(_said(error))
        else:
            made.key = digest.hexdigest()
        return made

    def find(
        self, function: FunctionType, scope: dict[str, Any] | None
    ) -> FoundCall | RefusedCall | None:
        """What was kept of the call, where all that its guards read is as it was.

        Args:
            function: the forward.
            scope: its variables, as guards name them; None where it cannot be called so.
        """
        if self.key is None or scope is None:
            return None
        found, self.reason = self._look(function, scope)
        counters["autosplit"]["call_hit" if found else "call_miss"] += 1
        return found

    def _look(
        self, function: FunctionType, scope: dict[str, Any]
    ) -> tuple[FoundCall | RefusedCall | None, str]:
        """The first call that fits, or why the one that was kept last does not."""
        data = self.store.read(str(self.key))
        reasons = []
        try:
            for form in [] if data is None else read_forms(data):
                try:
                    return self._use(form, function, scope), ""
                except Exception as error:
                    reasons.append(_said(error))
        except Exception as error:
            reasons.append(_said(error))
        return None, (reasons or ["no such call was kept"])[0]

    def _use(
        self, form: CallForm, function: FunctionType, scope: dict[str, Any]
    ) -> FoundCall | RefusedCall:
        from .kept_guards import KeptGuards

        guards, texts = KeptGuards(*form.guards), self.texts.apart()
        found: FoundCall | RefusedCall
        if form.refusal:
            guards.compare(scope, texts)
            found = RefusedCall(form.refusal)
        else:
            made = guards.manager(function, scope, texts)
            places = {number: (leaf, kind, at) for number, leaf, kind, at in form.places}
            found = FoundCall(form.graphs, form.names, read_spec(form.spec), *made, places)
        for text, category, file, line in form.told:
            warnings.warn_explicit(text, _CATEGORIES[category], file, line)
        return found

    def record(
        self,
        captured: Any,
        graph: fx.GraphModule | None,
        function: FunctionType,
        scope: dict[str, Any],
        told: Iterable[warnings.WarningMessage],
    ) -> None:
        """Take down what Dynamo's capture of the call depends on.

        Args:
            captured: its ``GraphCaptureOutput``.
            graph: that it made.
            function: that was captured.
            scope: its variables, as guards name them.
            told: warnings that were passed on.
        """
        if self.key is None:
            return
        try:
            from .kept_guards import KeptGuards

            facts = captured, graph, function, scope, self.texts, self.open_sizes
            self._guards = KeptGuards.of(*facts)
            self._captured = captured if self.open_sizes else None
            self._told = tuple(map(_warning, told))
        except Exception as error:  # other versions of torch, or what strange objects raise
            self.give_up(_said(error))

    def keep(
        self,
        graphs: str,
        symbols: SizeSymbols | None,
        *,
        names: tuple[str, ...],
        spec: TreeSpec,
        places: Mapping[Any, tuple[int, str, int]],
    ) -> None:
        """Store what was recorded.

        Args:
            graphs: key of the call's graphs, which are stored.
            symbols: sizes that they leave open; nothing more will be assumed of these.
            names: paths of the leaves of the result.
            spec: how the leaves make up the result.
            places: symbol of such a size -> where the inputs say it.
        """

        def results() -> dict[str, Any]:
            made = {"graphs": graphs, "names": names, "spec": write_spec(spec)}
            if symbols is None or self._guards is None:
                return made
            self._guards = self._guards.settled(self._captured, symbols, self.texts)
            numbers = {symbol: at for at, symbol in enumerate(symbols.order)}
            found = ((numbers[size], *place) for size, place in places.items() if size in numbers)
            return made | {"places": tuple(found)}

        self._write(results)

    def keep_refusal(self, message: str) -> None:
        """Store that what was recorded cannot be captured, but a call after it can.

        Args:
            message: why it cannot.
        """
        self._write(lambda: {"refusal": message})

    def _write(self, what: Callable[[], dict[str, Any]]) -> None:
        if self.key is None or self._guards is None:
            return
        try:
            given = what()
            fields = dataclasses.fields(self._guards)
            guards = tuple(getattr(self._guards, field.name) for field in fields)
            form = CallForm(guards, self._told, **given)
            data = with_form(self.store.read(self.key), form)
        except Exception as error:
            self.give_up(_said(error))
        else:
            self.store.write(self.key, data)

    def give_up(self, reason: str) -> None:
        """Have every process trace the call."""
        counters["autosplit"]["call_bypass"] += 1
        self.key, self.reason = None, reason


_CATEGORIES = {
    each.__name__: each
    for each in (UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning, SyntaxWarning)
}


def _warning(told: warnings.WarningMessage) -> Told:
    if _CATEGORIES.get(told.category.__name__) is not told.category:
        raise NoFingerprintError(f"tracing it warned with a {told.category.__qualname__}")
    return str(told.message), told.category.__name__, told.filename, told.lineno


def _said(error: Exception) -> str:
    if isinstance(error, OtherwiseError):
        return f"what it reads is otherwise here: {error}"
    if isinstance(error, NoFingerprintError):
        return str(error)
    return f"{type(error).__name__}: {error}"
