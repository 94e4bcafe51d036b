"""Run a written program operator by operator, to find the operator that first computed a wrong
value.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from autosplit.errors import ReplayError

Fault = Callable[[Any], str]
"""Returns what is wrong with a value, in words; empty if nothing is."""
Names = dict[str, Any]
Role = tuple[str, str]
"""The kind and the name of an argument or result, see ``passes.graph.Role``."""

_FILLS = ("full", "scalar_tensor", "masked_fill", "where")
"""Operators that make infinite values on purpose, as masks do."""


class Statement(NamedTuple):
    """One statement of a program.

    Attributes:
        names: the names of the values that it computes.
        operator: the function that it calls.
        operands: the names that it reads.
        code: the statement, compiled.
    """

    names: Sequence[str]
    operator: str
    operands: Sequence[str]
    code: CodeType

    @classmethod
    def of(cls, node: ast.stmt) -> Statement:
        """Compile a statement."""
        code = compile(ast.Module([node], []), "<program>", "exec")
        if not isinstance(node, ast.Assign) or ast.unparse(node.value) == "args":
            return cls((), "", (), code)
        call = getattr(node.value, "func", node.value)
        reads = [name for name in _names(node.value) if not hasattr(builtins, name)]
        return cls(_names(node.targets[0]), ast.unparse(call), reads, code)


def _names(expression: ast.expr) -> list[str]:
    """The names in an expression, in order."""
    return [name.id for name in ast.walk(expression) if isinstance(name, ast.Name)]


class FaultOrigin(NamedTuple):
    """The operator that first computed a wrong value.

    Attributes:
        statement: the operator's statement.
        reason: text on what is wrong with the value.
        values: the tensors that the operator read and computed, by name.
        samples: the samples of the microbatch for which the value is wrong; empty if it is wrong
            for all, or if it derives from parameters and buffers alone.
        argument: the role of the argument of the program in which the fault begins; None if it
            begins in the program.
    """

    statement: Statement
    reason: str
    values: Mapping[str, Tensor]
    samples: Sequence[int]
    argument: Role | None


class Program:
    """F, I, W or B of a stage, as read from a bundle.

    Args:
        path: the file.
        facts: roles of arguments and results, and the user's lines.
        constants: tensors that the program reads in addition to its arguments.

    Raises:
        ReplayError: the program calls an operator that is not registered in this process.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, Any], constants: Mapping[str, Tensor]
    ) -> None:
        self.source, self.facts, self.constants = path.read_text(), facts, constants
        self._globals: Names = {}
        exec(self.source, self._globals)
        (function,) = [n for n in ast.parse(self.source).body if isinstance(n, ast.FunctionDef)]
        arguments = zip(_argument_names(function), facts["inputs"], strict=True)
        self.roles: dict[str, Role] = {value: (kind, name) for value, (kind, name) in arguments}
        self._statements = [*map(Statement.of, function.body[:-1])]
        values: Any = function.body[-1]
        self.outputs = [ast.unparse(value) for value in values.value.elts]
        for statement in self._statements:
            _check_registered(statement.operator, self._globals)

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program; return its results."""
        names: Names = {}
        for _ in self.play(arguments, names):
            pass
        return [eval(output, names) for output in self.outputs]

    def play(self, arguments: Sequence[Any], names: Names) -> Iterator[Statement]:
        """Yield each statement, and then run it on ``names``."""
        names |= {**self._globals, "args": [*arguments], "constants": self.constants}
        for statement in self._statements:
            yield statement
            exec(statement.code, names)

    def sample_results(self, sample_arguments: Set[Role]) -> set[Role]:
        """The roles of the results that derive from arguments that have samples."""
        names = self.sample_values(sample_arguments)
        results = zip(self.outputs, self.facts["outputs"], strict=True)
        return {(kind, name) for value, (kind, name) in results if value in names}

    def sample_values(self, sample_arguments: Set[Role]) -> set[str]:
        """The names of the values that derive from arguments that have samples."""
        names = {name for name, role in self.roles.items() if role in sample_arguments}
        for statement in self._statements:
            if not names.isdisjoint(statement.operands):
                names.update(statement.names)
        return names


def _argument_names(function: ast.FunctionDef) -> list[str]:
    """The names to which a program unpacks its arguments, in order."""
    unpack = function.body[0]
    targets = unpack.targets if isinstance(unpack, ast.Assign) else []
    return [name for target in targets for name in _names(target)]


def _check_registered(operator: str, names: Names) -> None:
    """Raise a ``ReplayError`` if an operator, such as a user's own, is not registered."""
    if not operator.startswith("torch.ops."):
        return
    try:
        eval(operator, names)
    except AttributeError:
        namespace, name = operator.split(".")[2:4]
        raise ReplayError(
            f"operator {namespace}::{name} is not registered here: import the module that "
            "registers it, with --import MODULE"
        ) from None


@dataclass(frozen=True)
class OriginSearch:
    """Finds the operator from which a wrong result of a program comes.

    Attributes:
        program: the program.
        arguments: the arguments of the program in the wrong run.
        fault: a function that returns what is wrong with a value, as text.
        rows: the number of samples of the microbatch.
        sample_arguments: the roles of the arguments that have samples.
    """

    program: Program
    arguments: Sequence[Any]
    fault: Fault
    rows: int
    sample_arguments: Set[Role]

    def origin(self, result: int | None) -> FaultOrigin:
        """The first operator that computed a wrong value, the first one that reads a wrong
        argument, or the one that raises.

        Args:
            result: the position of the wrong result; None if the program raises.
        """
        program = self.program
        faults: dict[str, str] = {}
        makers: dict[str, Statement] = {}
        names: Names = {}
        try:
            for statement in program.play(self.arguments, names):
                faults |= {n: self.fault(names[n]) for n in statement.operands if n not in faults}
                makers |= dict.fromkeys(statement.names, statement)
        except Exception as error:
            return self._examine(statement, f"{type(error).__name__}: {error}")
        wrong = program.outputs[result or 0]
        faults[wrong] = self.fault(names[wrong])
        first = _first(wrong, makers, faults)
        for operand in makers[first].operands if first in makers else ():
            # NaN out of infinity: name what made that, unless it is a mask.
            root = _first(operand, makers, faults)
            if faults[operand] and not self._may_be_mask(root, makers):
                first = root
        # A statement that reads the size of a wrong value computes nothing wrong.
        affected = (s for s in makers.values() if any(map(faults.get, s.names)))
        reader = next(s for s in affected if first in (*s.names, *s.operands))
        return self._examine(reader, faults[first], program.roles.get(first))

    def _may_be_mask(self, name: str, makers: Mapping[str, Statement]) -> bool:
        """Whether infinity in a value may be on purpose: masks are filled, or come as buffers and
        inputs.
        """
        if name in makers:
            return any(fill in makers[name].operator for fill in _FILLS)
        role = self.program.roles.get(name)
        return role is None or role[0] != "parameter"

    def _examine(
        self, statement: Statement, reason: str, argument: Role | None = None
    ) -> FaultOrigin:
        """Run the program again up to a statement, and then run the statement for each sample
        alone.
        """
        rows, names = self.rows, Names()
        for following in self.program.play(self.arguments, names):
            if following is statement:
                break
        tensors = ((name, names[name]) for name in statement.operands)
        values = {name: t.clone() for name, t in tensors if isinstance(t, Tensor)}
        by_sample = values.keys() & self.program.sample_values(self.sample_arguments)
        samples = []
        for sample in range(rows):
            trial = values | {name: _alone(values[name], sample, rows) for name in by_sample}
            results = _results(statement, {**names, **trial})
            if results is None or any(map(self.fault, results)):
                samples.append(sample)
        computed = zip(statement.names, _results(statement, names) or (), strict=False)
        values |= {name: value for name, value in computed if isinstance(value, Tensor)}
        samples = samples if len(samples) < rows else []
        return FaultOrigin(statement, reason, values, samples, argument)


def _first(name: str, makers: Mapping[str, Statement], faults: Mapping[str, str]) -> str:
    """Follow a fault back to the name of the value where it begins: no operand of that value's
    statement has the same fault.
    """
    while name in makers:
        operands = makers[name].operands
        culprit = next((n for n in operands if faults[n] == faults[name]), None)
        if culprit is None:
            break
        name = culprit
    return name


def _results(statement: Statement, names: Names) -> list[Any] | None:
    """The results of a statement; None if it raises."""
    try:
        exec(statement.code, names)
    except Exception:
        return None
    return [names[name] for name in statement.names]


def _alone(tensor: Tensor, sample: int, rows: int) -> Tensor:
    """A copy of the tensor in which every sample is this one sample. A tensor whose first dimension
    is not samples is returned as it is.
    """
    if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % rows:
        return tensor
    by_sample: Tensor = tensor.unflatten(0, (rows, -1))
    return by_sample[sample : sample + 1].expand_as(by_sample).flatten(0, 1)
