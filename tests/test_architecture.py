"""``import autosplit`` stays light, and private torch in its rooms. import-linter has the rest."""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from autosplit.passes.manager import PASSES
from autosplit.torch_internals import OLDEST
from autosplit.torch_internals.patches import ON_OBJECTS, STATE

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "passes").rglob("*.py")) + sorted((ROOT / "autosplit").rglob("*.py"))


# Imports torch, then runs each line of the input in a fork of its own.
BY_ITSELF = """
import json, os, sys, torch
for line in sys.stdin:
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    before, error = {*sys.modules}, ""
    try:
        exec(line)
    except BaseException as raised:
        error = repr(raised)
    print(json.dumps([sorted({*sys.modules} - before), error]), flush=True)
    os._exit(0)
"""
LIGHT = "import autosplit"
STAGES = "import autosplit.checkpoint; from autosplit.pipeline import PipelineTrainer"
OLD, OLDEST_THERE_IS = (
    f"torch.__version__ = {version!r}; import autosplit; autosplit.split"
    for version in ("2.10.1+cpu", "2.11.0a0")
)


@pytest.fixture(scope="module")
def done() -> dict[str, tuple[list[str], str]]:
    """The modules that a statement loads, and the error it ends with."""
    statements = [LIGHT, STAGES, OLD, OLDEST_THERE_IS]
    command, lines = [sys.executable, "-c", BY_ITSELF], "\n".join(statements)
    result = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(statements, results, strict=True))


def test_importing_autosplit_is_light(done: dict[str, tuple[list[str], str]]) -> None:
    loaded, error = done[LIGHT]
    assert not error
    assert "autosplit" in loaded
    heavy = {"matplotlib", "transformers", "click", "tqdm", "torch.distributed.pipelining"}
    assert not {*loaded} & heavy
    assert not [name for name in loaded if name.startswith("autosplit.pipeline")]
    assert "torch.distributed.distributed_c10d" not in loaded
    assert "torch._dynamo.eval_frame" not in loaded


def test_training_stages_that_are_there_needs_no_planner(
    done: dict[str, tuple[list[str], str]],
) -> None:
    loaded, error = done[STAGES]
    assert not error
    assert "autosplit.trainer.trainer" in loaded
    assert not [name for name in loaded if name.startswith("autosplit.planner")]


def test_autosplit_refuses_a_torch_that_is_too_old(
    done: dict[str, tuple[list[str], str]],
) -> None:
    assert "autosplit needs torch 2.11 or later and found 2.10.1+cpu" in done[OLD][1]
    assert done[OLDEST_THERE_IS][1] == ""


def test_the_oldest_torch_is_that_of_the_dependencies() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in metadata["dependencies"]
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text()
    assert metadata["requires-python"] == ">=3.11"
    assert "Python 3.11 or later" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_pages_are_no_wider_than_sources(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert not [f"{page}:{at}" for at, line in enumerate(lines, 1) if len(line) > 100]


def test_private_torch_only_where_allowed() -> None:
    results = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / "autosplit/torch_internals") or "capture" in path.parts:
            continue
        text = re.sub(r"torch\.ops\.aten\._\w+|aten\._\w+", "", path.read_text())
        private = r"(?:from|import) torch[\w.]*\._\w+|\btorch(?:\.\w+)*\._[a-z]\w*"
        results[path] = re.findall(private, text)
    assert not {path: names for path, names in results.items() if names}


# --- what docstrings and pages name ---------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
WRITTEN = ["joint.py", "forward.py", "backward_input.py", "backward_weight.py", "backward.py"]
WRITTEN += ["forward.generated.py", "00_capture.joint.py", "boundary.md"]
WRITTEN += [f"{at + 1:02}_{each.name}.forward.py" for at, each in enumerate(PASSES)]
WRITTEN += ["train.py", "look.py", "train_llama.py", "my_model.py"]
"""Files of dumps, and of the pages' examples."""

TORCH = ["", ".nn", ".nn.functional", ".Tensor", ".ops.aten", ".nn.parallel", ".optim.Optimizer"]
TORCH += [".distributed.fsdp", ".distributed.fsdp.FSDPModule", ".distributed.tensor.parallel"]
TORCH += [".distributed.pipelining", ".distributed.pipelining.schedules"]
FOREIGN = """
x primals_3 output_mask initial_lr max_momentum reduce_dtype args_chunk_spec kwargs_chunk_spec
output_merge_spec loss_kwargs BlockMask associative_scan fullgraph_capture ContextVar softmax
_load_csv sSEND_Fm sRECV_Fm no_sync BatchNorm CUDA_DEVICE_MAX_CONNECTIONS TiedLayerSpec
SummaryWriter AveragedModel ChainMap DeviceMesh GLOO_SOCKET_IFNAME OrderedDict
PipeliningMetadataError Trainer a loss nn padding_idx pickle self
state param_groups PARAMETER KEY add_scalar ModelParallelStrategy ThroughputMonitor TQDMProgressBar
Profiler ProfileKwargs ModelCheckpoint CSVLogger DDP DCP ZBVZeroBubble FSDPStrategy mp_policy
"""
"""Words of other projects, and of examples."""


def is_there(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


class Names:
    """Names in a source file.

    Attributes:
        docstrings: of the module, its classes, functions and attributes.
        used: names in its code, and words in its strings.
        defined: its functions, classes, arguments and attributes.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.docstrings: list[str] = []
        self.used: set[str] = set()
        self.defined = {path.stem, *path.relative_to(ROOT).parent.parts}
        documentation: set[ast.AST] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.docstrings.append(str(node.value.value))
                documentation.add(node.value)
            elif isinstance(node, ast.Constant) and node not in documentation:
                self.used.update(re.findall(r"\w+", str(node.value)))
            local = [
                getattr(node, field, None) for field in ("name", "id", "attr", "arg", "module")
            ]
            names = {part for name in local if isinstance(name, str) for part in name.split(".")}
            self.used |= names
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg) or isinstance(
                getattr(node, "ctx", None), ast.Store
            ):
                self.defined |= names


@pytest.fixture(scope="module")
def sources() -> dict[pathlib.Path, Names]:
    return {path: Names(path) for path in SOURCES}


@pytest.fixture(scope="module")
def identifiers(sources: dict[pathlib.Path, Names]) -> set[str]:
    """Names that any docstring and page may use: ours, and those of Python and torch."""
    of_torch = [name for item in TORCH for name in dir(pkgutil.resolve_name("torch" + item))]
    ours = [name for source in sources.values() for name in source.defined]
    return {*ours, *of_torch, *FOREIGN.split(), *keyword.kwlist, *dir(builtins)}


@pytest.fixture(scope="module")
def files() -> list[str]:
    folders = ("autosplit", "passes", "tests", "benchmarks", "docs", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return [f"/{path.relative_to(ROOT)}" for path in [*paths, *ROOT.glob("*.*")]]


def is_stale(name: str, identifiers: set[str], roots: set[str], files: list[str]) -> bool:
    """Whether a name stands for nothing: a file, a dotted name or an identifier.

    Args:
        name: from a docstring or a page; expressions are never stale.
        identifiers: names that are defined somewhere.
        roots: with what dotted names may begin, unless they can be imported.
        files: paths of the project.
    """
    if re.fullmatch(r"[\w/.]+\.(py|md)", name):
        return name not in WRITTEN and not any(path.endswith(f"/{name}") for path in files)
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?", name):
        return False
    root, *rest = name.removesuffix("()").split(".")
    if not rest:
        return root not in identifiers
    if is_there("autosplit." * (root == "passes") + name.removesuffix("()")):
        return False
    return (
        root in ("autosplit", "passes", "torch") or root not in roots or not identifiers >= {*rest}
    )


def documented(docstring: str) -> list[str]:
    """Arguments and attributes that a docstring lists."""
    sections = re.findall(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n|\n)*)", docstring, re.M)
    return [
        name
        for margin, text in sections
        for name in re.findall(rf"^{margin}    (\w+):", text, re.M)
    ]


def test_names_in_docstrings_are_there(
    sources: dict[pathlib.Path, Names], identifiers: set[str], files: list[str]
) -> None:
    modules = {part for path in SOURCES for part in (path.stem, path.parent.name)}
    classes = {*re.findall(r"\b[A-Z]\w+", " ".join(identifiers))}
    stale = []
    for path, local in sources.items():
        names = identifiers | local.used
        roots = local.used | modules | classes | {*FOREIGN.split()}
        for text in local.docstrings:
            named = re.findall(r"``(.+?)``", text)
            results = [name for name in named if is_stale(name, names, roots, files)]
            results += [name for name in documented(text) if name not in local.used]
            stale += [f"{path.relative_to(ROOT)}: {name}" for name in results]
    assert stale == []


def test_names_on_pages_are_there(identifiers: set[str], files: list[str]) -> None:
    """Modules, files, and names in capitals or camel case; others may be of the reader's code."""
    ours = re.compile(r"(autosplit|passes)\.\w|[A-Z]|(?!torch/).*\.(py|md)$")
    stale = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())
        if ours.match(name) and is_stale(name, identifiers, identifiers, files)
    ]
    assert stale == []


@pytest.mark.parametrize(
    "name", ["passes.memory", "passes/no_such.py", "no_such.build", "Stage.no_such", "no_such()"]
)
def test_a_stale_name_is_found(name: str, identifiers: set[str], files: list[str]) -> None:
    assert is_stale(name, identifiers, identifiers, files)
    assert not is_stale("Stage.publish", identifiers, identifiers, files)
    assert documented("Made.\n\nArgs:\n    one: x\n        more: y\n    two: z\n") == ["one", "two"]


# Calls that change state of the process, and calls that do so at the top level of a module.
CHANGES = re.compile(
    r".*\.config(?=\.patch$)"
    r"|os\.environ\.(update|setdefault)|signal\.signal|gc\.(disable|freeze)|\w+\.addFilter"
    r"|warnings\.(catch_warnings|filterwarnings)|_KEPT\.update"
    r"|torch\.(_C\._set_mkldnn_enabled|set_num_threads|set_rng_state|set_default_\w+)"
    r"|torch\.cuda\.set_device|register_(optimizer_step|module|pytree)_\w+"
)
KEEPS = re.compile(r"(threading\.)?(RLock|Lock|local)|ContextVar|(torch\.library\.)?Library")


def state_of(tree: ast.Module) -> set[str]:
    """Process-global state that a module keeps or changes, named as in ``STATE``."""
    names = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        if function == "patched":
            owner, name = call.args[:2]
            attribute = (
                f".{name.value}" if isinstance(name, ast.Constant) else f"[{ast.unparse(name)}]"
            )
            names.add(ast.unparse(owner) + attribute)
        elif match := CHANGES.match(function):
            names.add(match[0])
    for statement in tree.body:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and KEEPS.fullmatch(ast.unparse(value.func)):
            names.add(ast.unparse(value.func))
    return names


def test_process_global_state_is_listed() -> None:
    kept = {
        (name, str(path.relative_to(ROOT)))
        for path in SOURCES
        for name in state_of(ast.parse(path.read_text()))
    }
    listed = [(row.name, row.file) for row in STATE]
    assert kept == {*listed}
    assert len(listed) == len({*listed})
    for row in ON_OBJECTS:
        assert row.name in (ROOT / row.file).read_text(), row.name


def test_torch_is_patched_through_one_function() -> None:
    """``unittest.mock`` is imported where ``patched`` is defined, and nowhere else."""
    users = [path.name for path in SOURCES if "unittest" in path.read_text()]
    assert users == ["patches.py"]


PRONOUNS = frozenset(
    [
        "found",
        "made",
        "told",
        "tells",
        "said",
        "says",
        "given",
        "gives",
        "held",
        "lies",
        "lying",
        "known",
        "own",
        "there",
        "behind",
        "before",
        "around",
        "others",
        "asked",
        "asks",
        "whose",
        "taken",
        "takes",
        "taking",
        "lent",
        "each",
        "every",
        "besides",
        "away",
        "back",
        "those",
        "these",
        "what",
        "where",
    ]
)
"""Names that do not say what they hold."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every assignment, parameter and definition."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.arg():
                yield node.lineno, node.arg
            case ast.FunctionDef() | ast.ClassDef():
                yield node.lineno, node.name


def test_names_are_nouns() -> None:
    """No name of the sources is a pronoun or a participle alone, but ``Stage.held``, which is
    public and which stages of others implement.
    """
    pronouns = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        for line, name in bound_names(ast.parse(path.read_text()))
        if name.strip("_").lower() in PRONOUNS
    ]
    assert [
        row for row in pronouns if not row.startswith("autosplit/runtime/held_microbatches.py")
    ] == []
