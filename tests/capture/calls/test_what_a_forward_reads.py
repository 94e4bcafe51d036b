"""Where what a forward reads changes between two calls, the second computes as eager does."""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autosplit
from autosplit.capture.cache.split_graph_cache import VARIABLE
from autosplit.torch_internals.version import TORCH

NAME = "read_by_a_forward"
HEAD = """
import collections, enum, functools, os, sys
import torch
from torch import nn

class Thing:
    def __init__(self, value):
        self.value = value

    def double(self):
        return self.value * 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        build(self)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * read(self, x)

def build(m):
    pass
"""
CASES = {
    "integer": (
        """
N = 2
def read(m, x): return N
""",
        """
N = 3
""",
    ),
    "order": (
        """
N = {'a': 2, 'b': 5}
def read(m, x): return list(N.values())[0]
""",
        """
N['a'] = N.pop('a')
""",
    ),
    "getattr": (
        """
class C:
    def __getattr__(self, n): return D[n]
D = {'a': 2}
N = C()
def read(m, x): return N.a
""",
        """
D['a'] = 3
""",
    ),
    "enumeration": (
        """
class E(enum.Enum):
    A = 2
    B = 3
N = E.A
def read(m, x): return 2 if N is E.A else 3
""",
        """
N = E.B
""",
    ),
    "function": (
        """
def f(): return 2
def read(m, x): return f()
""",
        """
def f(): return 3
""",
    ),
    "code": (
        """
def f(): return 2
def g(): return 3
def read(m, x): return f()
""",
        """
f.__code__ = g.__code__
""",
    ),
    "closure": (
        """
def make(n):
    def f(): return n
    return f
f = make(2)
def read(m, x): return f()
""",
        """
f = make(3)
""",
    ),
    "default": (
        """
def f(a=2): return a
def read(m, x): return f()
""",
        """
f.__defaults__ = (3,)
""",
    ),
    "decorated": (
        """
def d(f):
    @functools.wraps(f)
    def w(): return f() + K
    return w
K = 1
@d
def f(): return 2
def read(m, x): return f()
""",
        """
K = 2
""",
    ),
    "replaced method": (
        """
N = Thing(2)
def read(m, x): return N.double()
""",
        """
Thing.double = lambda self: 9
""",
    ),
    "meta class": (
        """
class M(type):
    @property
    def a(cls): return K
K = 2
class C(metaclass=M): pass
def read(m, x): return C.a
""",
        """
K = 3
""",
    ),
    "same object": (
        """
A = Thing(2)
B = A
def read(m, x): return 2 if A is B else 3
""",
        """
B = Thing(2)
""",
    ),
    "is instance": (
        """
N = Thing(2)
class T2(Thing): pass
def read(m, x): return 2 if isinstance(N, T2) else 3
""",
        """
N = T2(2)
""",
    ),
    "constant result": (
        """
K = 2
@torch._dynamo.assume_constant_result
def f(): return K
def read(m, x): return f()
""",
        """
K = 3
""",
    ),
    "environment read": (
        """
os.environ['READ_BY'] = '2'
def read(m, x): return int(os.getenv('READ_BY', '1'))
""",
        """
os.environ['READ_BY'] = '3'
""",
    ),
    "arguments": (
        """
import sys
def read(m, x): return len(sys.argv)
""",
        """
sys.argv = [*sys.argv, 'a']
""",
    ),
    "default dtype": (
        """
def read(m, x): return torch.ones(3)
""",
        """
torch.set_default_dtype(torch.float64)
""",
    ),
    "deep in the module": (
        """
def build(m): m.n = Thing(Thing({'a': Thing(2)}))
def read(m, x): return m.n.value.value['a'].value
""",
        """
MODEL.n.value.value['a'].value = 3
""",
    ),
    "function of the module": (
        """
def build(m): m.f = lambda: 2
def read(m, x): return m.f()
""",
        """
MODEL.f = lambda: 3
""",
    ),
    "what a hook reads": (
        """
K = 2
def build(m): m.linear.register_forward_hook(lambda m, a, r: r * K)
def read(m, x): return 2
""",
        """
K = 3
""",
    ),
    "hook of all": (
        """
def double(m, a, r): return r * 2 if type(m) is nn.Linear else r
def read(m, x): return 2
""",
        """
HANDLE = nn.modules.module.register_module_forward_hook(double)
""",
    ),
    "torch's method": (
        """
def read(m, x): return 2
""",
        """
OLD = nn.Linear.forward
nn.Linear.forward = lambda self, x: OLD(self, x) * 2
""",
    ),
    "torch's function": (
        """
def read(m, x): return torch.sin(x)
""",
        """
OLD = torch.sin
torch.sin = torch.cos
""",
    ),
    "frozen": (
        """
def read(m, x): return 2
""",
        """
MODEL.linear.weight.requires_grad_(False)
""",
    ),
    "tensor": (
        """
N = torch.ones(3)
def read(m, x): return N
""",
        """
N[0] = 5
""",
    ),
    "text of a class": (
        """
class S(str): pass
N = S('a')
def read(m, x): return 2 if N == 'a' else 3
""",
        """
N = S('b')
""",
    ),
    "named tuple": (
        """
P = collections.namedtuple('P', 'a b')
N = P(2, 3)
def read(m, x): return N.a
""",
        """
N = P(4, 3)
""",
    ),
    "attributes": (
        """
N = Thing(2)
def read(m, x): return sum(vars(N).values())
""",
        """
N.value = 3
""",
    ),
    "registered class": (
        """
import abc
class A(abc.ABC): pass
def read(m, x): return 2 if issubclass(Thing, A) else 3
""",
        """
A.register(Thing)
""",
    ),
}
"""Name -> (what the forward reads, how that changes)."""
UNTRACED = "found"
# Nothing says in another process whether these are the same.
ALWAYS_TRACED = {"environment read", "text of a class", "tensor"}
# Dynamo of torch 2.11 compares such a text as if it were another, and refuses the other two.
SINCE_2_12 = {"text of a class", "meta class", "attributes"}


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An empty module; what programs change elsewhere is put back."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setenv("READ_BY", "")
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    monkeypatch.setattr(torch, "sin", torch.sin)
    monkeypatch.setattr(sys, "argv", sys.argv)
    module = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    yield module
    if "HANDLE" in vars(module):
        module.HANDLE.remove()
    torch.set_default_dtype(torch.float32)


def said(split: autosplit.SplitModule) -> str:
    return split.report().partition("Graph cache: ")[2].partition(".\n")[0]


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_noticed(case: str, program: types.ModuleType) -> None:
    if TORCH < (2, 12) and case in SINCE_2_12:
        pytest.skip("torch.compile of torch 2.11 does not take it, or not as eager mode does")
    before, change = CASES[case]
    exec(compile(HEAD + before, f"{NAME}.py", "exec"), vars(program))
    torch.manual_seed(0)
    program.MODEL = program.Model()
    x, outcomes = torch.arange(6.0).reshape(2, 3), []
    for text in ("", "", change):
        exec(compile(text, f"{NAME}_changed.py", "exec"), vars(program))
        split = autosplit.split(program.MODEL, fullgraph=True)
        assert torch.equal(split(x), program.MODEL(x))
        outcomes.append(said(split))
    assert (outcomes[1] == UNTRACED) == (case not in ALWAYS_TRACED), outcomes
    assert outcomes[2] != UNTRACED
