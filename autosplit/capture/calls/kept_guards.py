"""``KeptGuards``: the guards of a captured graph as plain data, with digests of what they found.

torch keeps guards too (``torch._dynamo.package``), but none that compare objects by identity, which
functions, classes and globals are compared by: every model of transformers has such guards. Here
what they found has a text, which another process compares with its own before it builds guards over
its own objects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.source import ConstDictKeySource
from torch._guards import ChainedSource, Guard, GuardsSet, Source
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.capture.cache.archive_names import named_operator
from autosplit.capture.cache.argument_text import NoFingerprintError, is_torch_operator
from autosplit.capture.cache.custom_operators import definition_text
from autosplit.capture.cache.size_symbols import SizeSymbols
from autosplit.passes.analysis.operators import OVERLOAD

from .call_errors import OtherwiseError
from .call_sizes import CallSizes, KnownLayout, known_layouts
from .guard_forms import (
    GuardForm,
    SourceForm,
    SourceWriter,
    looked_at,
    read_guard,
    read_options,
    read_sources,
)
from .guard_texts import guard_text, reads_process
from .object_text import ObjectTexts
from .unusual_captures import refuse_unusual

SettledSizes: TypeAlias = tuple[FakeTensorMode, SizeSymbols]
"""Of the values of a graph, and its sizes that are left open."""
_BUILTINS = "__builtins_of_kept_guards"
"""Name of the builtins among a forward's globals: Dynamo's has a number of the process's."""
_ADDRESS = re.compile(r"_\d+_c\d+")
_DIGEST = 16
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Modules of Python's own in which no function reads what others set.
_PURE = {"_collections_abc", "abc", "collections", "contextlib", "copy", "dataclasses", "enum"}
_PURE |= {"functools", "inspect", "numbers", "operator", "types", "typing"}
_ENVIRONMENT = ("_Environ.", "_createenviron.")  # of ``os``: what is read there is guarded
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)


@dataclasses.dataclass(frozen=True)
class KeptGuards:
    """Guards of one captured graph.

    Attributes:
        sources: where the guards look.
        guards: what they look for.
        digests: of what each found.
        ordered: sources of dictionaries whose keys' order counts.
        sizes: source of a tensor, its sizes and strides; None for those that are left open.
        imports: names that Dynamo gave modules among the forward's globals.
        operators: custom operators in the graph, and digests of their definitions.
        open_sizes: fields of its ``CallSizes``; empty where none are left open.
    """

    sources: tuple[SourceForm, ...]
    guards: tuple[GuardForm, ...]
    digests: tuple[bytes, ...]
    ordered: tuple[int, ...]
    sizes: tuple[KnownLayout, ...]
    imports: tuple[tuple[str, str], ...]
    operators: tuple[tuple[str, str], ...]
    open_sizes: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        captured: Any,
        graph: fx.GraphModule | None,
        function: FunctionType,
        scope: dict[str, Any],
        texts: ObjectTexts,
        open_sizes: bool = False,
    ) -> KeptGuards:
        """The guards of what Dynamo captured. Where sizes are left open, ``settled`` says later
        what is assumed of them.

        Args:
            captured: its ``GraphCaptureOutput``.
            graph: that it made.
            function: that was captured.
            scope: its variables, as guards name them.
            texts: of the call's key.
            open_sizes: whether sizes were to be left open.

        Raises:
            NoFingerprintError: another process could not tell whether it may use the graph.
        """
        output = captured.output_graph
        refuse_unusual(output, open_sizes)
        builtin = str(output.name_of_builtins_dict_key_in_fglobals)
        made_names = _names_of_modules(output.guards, scope["G"])
        names = {name: alias for name, (alias, _) in made_names.items()}
        writer = SourceWriter({builtin: _BUILTINS, **names}, texts.hooks)
        forms = [writer.guard(guard) for guard in sorted(output.guards, key=Guard.sort_key)]
        ordered = [writer.row(source) for source in output.guard_on_key_order]
        sizes = known_layouts(output, writer.row, open_sizes)
        imports = {**output.import_sources, **dict(made_names.values())}
        _refuse_made_names(writer.table, {*imports, _BUILTINS})
        made = cls(
            tuple(writer.table),
            tuple(forms),
            (),
            tuple(sorted(ordered)),
            sizes,
            tuple(imports.items()),
            tuple((op.name(), _definition(op)) for op in _custom_operators(graph)),
        )
        aliases = {alias: sys.modules[name] for alias, name in made_names.values()}
        here = scope | {"G": {**scope["G"], **aliases, _BUILTINS: scope["G"][builtin]}}
        sources = read_sources(made.sources)
        digests = tuple(digest for digest, _ in made._digests(sources, here, texts))
        _refuse_unseen(captured.traced_code, function, texts)
        return dataclasses.replace(made, digests=digests)

    def settled(self, captured: Any, symbols: SizeSymbols, texts: ObjectTexts) -> KeptGuards:
        """With what is assumed of open sizes by now, to which nothing will be added.

        Args:
            captured: as ``of`` took it.
            symbols: sizes that are left open.
            texts: of the call's key.

        Raises:
            NoFingerprintError: it has no form on disk.
        """
        output = captured.output_graph
        writer = SourceWriter.going_on(self.sources, read_sources(self.sources), texts.hooks)
        sizes = known_layouts(output, writer.row, True)
        found = CallSizes.of(output.shape_env, symbols, writer.row)
        return dataclasses.replace(
            self, sources=tuple(writer.table), sizes=sizes, open_sizes=tuple(found)
        )

    def manager(
        self, function: FunctionType, scope: dict[str, Any], texts: ObjectTexts
    ) -> tuple[Any, Any, SettledSizes | None]:
        """Dynamo's guards over the objects of this process, what must live as long, and the sizes
        that are left open.

        Args:
            function: that would be captured.
            scope: its variables.
            texts: of the call's key.

        Raises:
            OtherwiseError: they would find something else than where they were kept.
            Exception: they cannot be asked here.
        """
        sources = self.compare(scope, texts)
        guards = {read_guard(form, sources, texts.hooks) for form in self.guards}
        if not self.open_sizes:
            return *self._build(function, scope, sources, guards, None), None
        value = _reader(scope)
        mode, symbols = CallSizes(*self.open_sizes).environment(sources, value)
        return *self._build(function, scope, sources, guards, mode.shape_env), (mode, symbols)

    def compare(self, scope: dict[str, Any], texts: ObjectTexts) -> list[Source]:
        """Compare what the guards find in this process.

        Args:
            scope: variables of what would be captured.
            texts: of the call's key.

        Returns:
            where they look.

        Raises:
            OtherwiseError: they would find something else than where they were kept.
            Exception: they cannot be asked here.
        """
        for name, definition in self.operators:
            if _definition(named_operator(name)) != definition:
                raise OtherwiseError(f"the custom operator {name}")
        self._name_modules(scope["G"])
        sources = read_sources(self.sources)
        for (digest, what), kept in zip(
            self._digests(sources, scope, texts), self.digests, strict=True
        ):
            if digest != kept:
                raise OtherwiseError(what)
        return sources

    def _name_modules(self, names: dict[str, Any]) -> None:
        """Add to a forward's globals what Dynamo adds: modules and builtins by names of its own."""
        # What the forward would import is imported by tracing it, not by reading a file.
        found: dict[str, Any] = {alias: sys.modules[module] for alias, module in self.imports}
        builtin = names["__builtins__"]
        found[_BUILTINS] = builtin if isinstance(builtin, dict) else vars(builtin)
        for alias, value in found.items():
            if names.setdefault(alias, value) is not value:
                raise OtherwiseError(f"the global {alias} is something else")

    def _digests(
        self, sources: Sequence[Source], scope: dict[str, Any], texts: ObjectTexts
    ) -> Iterator[tuple[bytes, str]]:
        """Digest of what each guard finds, and how the forward calls that."""
        value, texts = _reader(scope), texts.counting_on()
        for form in self.guards:
            row, kind, options = form
            source = sources[row]
            if reads_process(kind):
                text = kind
            else:
                read = read_options(options, sources, texts.hooks)
                given, source = looked_at(kind, read, source)
                given = {k: value(v) if isinstance(v, Source) else v for k, v in given.items()}
                found = value(source)
                if isinstance(source, ConstDictKeySource):
                    found = texts.hooks.key_text(value(source.base), found) or found
                try:
                    text = guard_text(kind, given, found, texts)
                except NoFingerprintError as reason:
                    raise NoFingerprintError(f"{source.name}: {reason}") from None
            yield hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest(), source.name
        for row in self.ordered:
            table = value(sources[row])
            keys = [texts.hooks.key_text(table, key) or texts.exact(key) for key in table]
            text = f"keys {keys}"
            yield hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest(), sources[row].name

    def _build(
        self,
        function: FunctionType,
        scope: dict[str, Any],
        sources: Sequence[Source],
        guards: set[Guard],
        shapes: Any,
    ) -> tuple[Any, Any]:
        state = OutputGraphGuardsState(
            local_scope=scope["L"],
            global_scope=scope["G"],
            torch_function_mode_stack=[],
            guard_on_key_order={sources[row] for row in self.ordered},
            input_source_to_sizes_strides={
                sources[row]: {"size": size, "stride": stride} for row, size, stride in self.sizes
            },
            dual_level=-1,
            functorch_layers=[],
            current_device=torch.utils._device.CURRENT_DEVICE,
            global_state_guard=GlobalStateGuard(),
            _guards=GuardsSet(guards),  # type: ignore[arg-type]
            _aotautograd_guards=[],
            skip_guards_check=True,
            name_of_builtins_dict_key_in_fglobals=_BUILTINS,
        )
        checked = dynamo_guards.CheckFunctionManager(
            function.__code__, OutputGraphCommon(state, shape_env=shapes)
        )
        if not checked.guard_manager.check(scope["L"]):
            raise OtherwiseError("guards do not hold for what they are built for")
        return checked.guard_manager, checked


def _reader(scope: dict[str, Any]) -> Callable[[Source], Any]:
    """Finds values among the variables of a forward."""
    outer = {"L": scope["L"], "G": scope["G"], "__builtins__": vars(__import__("builtins"))}
    inner = dynamo_guards._get_closure_vars()
    known: dict[Source, Any] = {}
    return lambda source: source.get_value(outer, inner, known)


def _custom_operators(graph: fx.GraphModule | None) -> list[Any]:
    """Operators in a graph, and in those that it holds, that are not torch's: AOTAutograd goes
    through their definitions, which Dynamo does not look at.
    """
    parts = [] if graph is None else [p for p in graph.modules() if isinstance(p, fx.GraphModule)]
    called = {
        each
        for part in parts
        for node in part.graph.nodes
        for each in (node.target, *node.args)
        if isinstance(each, OVERLOAD) and not is_torch_operator(each)
    }
    return sorted(called, key=lambda operator: str(operator.name()))


def _definition(operator: Any) -> str:
    return hashlib.sha256(definition_text(operator).encode()).hexdigest()


def _names_of_modules(guards: Iterable[Guard], names: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Names with an object's address that Dynamo gave modules -> names for every process, and the
    modules' own.
    """
    found = {}
    for guard in guards:
        name = _root_name(guard.originating_source)
        module = names.get(name)
        if _ADDRESS.search(name) and isinstance(module, ModuleType):
            alias = f"__kept_{module.__name__.replace('.', '_dot_')}"
            found[name] = alias, module.__name__
    return found


def _root_name(source: Source) -> str:
    root = source.get_base() if isinstance(source, ChainedSource) else source
    return str(getattr(root, "global_name", ""))


def _refuse_made_names(table: Sequence[SourceForm], known: set[str]) -> None:
    """Refuse globals that Dynamo made for this process only."""
    for kind, fields in table:
        name = dict(fields).get("global_name", ("value", ""))[1]
        if (name.startswith("__") or _ADDRESS.search(name)) and name not in known:
            raise NoFingerprintError(f"a guard reads {name}, a {kind} of this process")


def _refuse_unseen(codes: Sequence[CodeType], function: FunctionType, texts: ObjectTexts) -> None:
    """Refuse what was traced through code of which nothing in the key or the guards tells."""
    texts.exact(function)
    foreign = sorted(name for name in texts.constant if not name.startswith("torch."))
    if foreign:
        raise NoFingerprintError(f"{foreign[0]} computes what tracing takes for a constant")
    for code in codes:
        library = _library_module(code.co_filename)
        # Dynamo guards nothing that Python's own modules read.
        pure = library in _PURE or code.co_qualname.startswith(_ENVIRONMENT)
        known = pure if library is not None else code in texts.codes
        if not known and not code.co_filename.startswith(_TORCH):
            raise NoFingerprintError(
                f"it goes through {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}), "
                "which is reached, or reads, in ways that no guard tells"
            )


def _library_module(file: str) -> str | None:
    """Name of the module of Python's own that a file is; None for another file."""
    if file.startswith("<frozen "):
        return file.removeprefix("<frozen ").rstrip(">")
    if not file.startswith(_PYTHON) or file.startswith(_PACKAGES):
        return None
    return file.removeprefix(_PYTHON).partition(os.sep)[0].removesuffix(".py")
