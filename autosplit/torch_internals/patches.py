"""The list of all process-global state that autosplit keeps or changes, and ``patched``.

``STATE`` has one row for each piece of state. ``ON_OBJECTS`` has one row for each attribute that
autosplit adds to the user's objects. ``tests/test_architecture.py`` compares both lists with the
code. Caches of pure functions (``functools.cache``) are not listed.

Only ``patched`` replaces attributes of torch, while a graph is traced or compiled. Other threads
see the replacement too: a ``torch.compile`` in another thread then traces with it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

__all__ = ["ON_OBJECTS", "STATE", "patched"]


class GlobalState(NamedTuple):
    """One piece of process-global state.

    Attributes:
        name: the attribute, setting or function, as the file writes it.
        file: the file that keeps or changes it.
        why: the reason for the state.
        torch: the versions of torch that need the state, such as ``"2.13"``; ``"all"`` for 2.11 to
            2.15.
        issue: issue or pull request of pytorch about it; empty if none is known.
    """

    name: str
    file: str
    why: str
    torch: str = "all"
    issue: str = ""


_READS = "autosplit/capture/backward_reads.py"
_EXPORT = "autosplit/capture/export.py"
_WRITES = "autosplit/capture/side_effects.py"
_DYNAMO = "autosplit/capture/workarounds/dynamo.py"
_OPERATORS = "autosplit/capture/workarounds/operators.py"
_SAVING = "autosplit/checkpoint/saving.py"
_GROUP = "autosplit/ranks/default_group.py"
_LAUNCH = "autosplit/ranks/launch.py"

STATE = (
    # Attributes of torch, replaced by ``patched`` while a graph is traced.
    GlobalState(
        "InstructionTranslator._return",
        "autosplit/capture/attribute_values.py",
        "lets a traced forward return the tensors that it sets as attributes, too",
    ),
    GlobalState(
        "AutogradFunctionApplyVariable.trace_backward_graph",
        _READS,
        "knows whether a custom function's backward is being traced",
    ),
    GlobalState(
        "VariableTracker.build",
        _READS,
        "makes floats and tensors that a backward reads operators instead of constants",
    ),
    GlobalState(
        "AutogradFunctionVariable[_GET_ATTRIBUTE]",
        _READS,
        "does the same for attributes of the function's class",
    ),
    GlobalState(
        "SideEffects._get_modified_vars",
        _WRITES,
        "records the objects that a forward writes to; an export drops the record",
    ),
    GlobalState(
        "SideEffects._capture_user_stack",
        _WRITES,
        "notes the user's line of each write, which errors name",
    ),
    GlobalState(
        "SideEffects.register_hook",
        _DYNAMO,
        "finds hooks on tensors that the forward did not compute; an export drops them",
    ),
    GlobalState("SideEffects.remove_hook", _DYNAMO, "forgets such a hook that is removed again"),
    GlobalState(
        "UnspecializedNNModuleVariable.call_function",
        "autosplit/capture/region_session.py",
        "calls an operator in place of a block, while the block's model is captured",
    ),
    GlobalState(
        "UserFunctionVariable.call_function",
        "autosplit/capture/workarounds/cache_layers.py",
        "reads a configuration once for all layers of a key-value cache",
    ),
    GlobalState(
        "UserFunctionVariable.call_function",
        "autosplit/capture/workarounds/module_slices.py",
        "slices module lists without checks of each module",
    ),
    GlobalState(
        "UserFunctionVariable.call_function",
        _DYNAMO,
        "answers questions about values of attention masks, which a graph cannot read",
    ),
    GlobalState(
        "trace_rules.get_mod_inlinelist",
        _DYNAMO,
        "lets Dynamo trace layers for quantization-aware training",
    ),
    GlobalState(
        "OutputGraph.create_proxy",
        _DYNAMO,
        "counts the operators of each line, to stop at long unrolled loops",
    ),
    GlobalState(
        "symbolic_convert.get_funcname",
        _DYNAMO,
        "skips names of functions for a log; each traced file is tokenized to find them",
    ),
    GlobalState(
        "LocalMapWrappedHigherOrderVariable.should_wrap_in_hop",
        _DYNAMO,
        "skips a comparison that is always False, for which torch imports a slow module",
    ),
    GlobalState(
        "guards.profile_guard_manager",
        _DYNAMO,
        "skips the timing of guards, which flushes the processor's caches for a log",
    ),
    GlobalState(
        "tracing_state_functions()[torch.compiler.is_exporting]",
        _DYNAMO,
        "lets a forward choose its form for compilers, as under torch.compile",
        "2.12 on",
    ),
    GlobalState(
        "MemoryFormatMeta.from_tensor",
        _OPERATORS,
        "expects contiguous gradients of outputs that overlap themselves",
    ),
    GlobalState(
        "runtime_wrappers.remove_dupe_metadata",
        _OPERATORS,
        "keeps the tangents of outputs beside buffers with two names that a forward writes",
    ),
    GlobalState(
        "effects.has_effects",
        _OPERATORS,
        "traces checks of linear algebra without tokens, with which graphs cannot be split",
    ),
    GlobalState(
        "proxy_tensor._build_proxy_for_sym_expr",
        _OPERATORS,
        "multiplies symbolic sizes two at a time",
        "2.13",
    ),
    GlobalState(
        "_meta_registrations._meta_grouped_mm_common",
        _OPERATORS,
        "accepts grouped products of float32 and float16, for which kernels exist",
        issue="pytorch/pytorch#162059",
    ),
    GlobalState(
        "operator.py_kernels[key]",
        _OPERATORS,
        "gives the sparse gradient of an embedding rows for padding, so that its size is known",
    ),
    GlobalState(
        "torch.compiler.is_compiling",
        "autosplit/torch_internals/pytree.py",
        "lets BlockMask flatten the tensors of its function while torch compiles something",
    ),
    GlobalState(
        "cpu_vec_isa.valid_vec_isa_list",
        "autosplit/torch_internals/instruction_set.py",
        "tests the CPU's best instruction set only, while the model is captured",
    ),
    GlobalState(
        "AsyncCompile.wait",
        "autosplit/torch_internals/kernel_files.py",
        "compiles C++ kernels while the next graphs are compiled",
    ),
    GlobalState(
        "AsyncCompile.cpp_pybinding",
        "autosplit/torch_internals/kernel_files.py",
        "compiles the C++ kernels of several graphs in one file, which takes less time",
    ),
    GlobalState(
        "PythonWrapperCodegen.codegen_input_size_asserts",
        "autosplit/torch_internals/inductor.py",
        "leaves out assertions that guards make, half a microsecond for each input of a graph",
    ),
    GlobalState(
        "codecache.FxGraphCachePickler.debug_lines",
        "autosplit/torch_internals/inductor.py",
        "leaves out descriptions of cache keys for logs that are off",
    ),
    GlobalState(
        "KernelTemplate._template_from_string",
        "autosplit/torch_internals/kernel_templates.py",
        "parses templates of GPU kernels at their first use instead of Inductor's import",
    ),
    GlobalState(
        "joint_graph.lazy_init",
        "autosplit/torch_internals/inductor.py",
        "loads no patterns of attention for a graph that cannot have attention",
    ),
    GlobalState(
        "fuse_attention._sfdp_init",
        "autosplit/torch_internals/inductor.py",
        "leaves these patterns out while the other patterns are loaded",
    ),
    # Other state of torch, changed while a graph is traced.
    GlobalState(
        "_KEPT.update",
        _OPERATORS,
        "fx's _side_effectful_functions: dead code elimination keeps checks of linear algebra",
    ),
    GlobalState(
        "torch._C._set_mkldnn_enabled",
        _OPERATORS,
        "traces recurrent layers without the fused kernel, which differs from its fake kernel",
    ),
    GlobalState(
        "torch._dynamo.config",
        "autosplit/capture/guards.py",
        "builds guards under the settings of the capture (DYNAMO)",
    ),
    GlobalState("torch._dynamo.config", _EXPORT, "captures under the settings DYNAMO"),
    GlobalState(
        "torch._dynamo.config",
        "autosplit/capture/dynamo_graph.py",
        "compiles a model under torch.compile as eager mode runs it (AS_IN_EAGER)",
    ),
    GlobalState(
        "torch._inductor.config", _OPERATORS, "keeps unused random operators (fallback_random)"
    ),
    GlobalState("torch._functorch.config", _OPERATORS, "traces the backward outside of autocast"),
    GlobalState(
        "torch._inductor.config",
        "autosplit/torch_internals/inductor.py",
        "compiles without CUDA graphs, which reuse the memory of the last microbatch's results",
    ),
    # Other state, changed while a context is open.
    GlobalState("warnings.catch_warnings", _EXPORT, "issues warnings after the trace"),
    GlobalState(
        "warnings.catch_warnings", _SAVING, "silences torch's warning about a single process"
    ),
    GlobalState("warnings.filterwarnings", _SAVING, "as the row above"),
    GlobalState(
        "warnings.catch_warnings",
        "autosplit/pipelining/agreement.py",
        "silences the deprecation of torch's own class of a leaf",
    ),
    GlobalState(
        "torch.set_rng_state",
        "autosplit/device.py",
        "restores saved states of generators, as recomputation and trial runs need",
    ),
    GlobalState(
        "torch.set_rng_state",
        "autosplit/pipeline/engine/stage_seeds.py",
        "restores the generator after the next number was read ahead",
    ),
    GlobalState(
        "log.addFilter",
        "autosplit/capture/diagnosis.py",
        "silences errors that fake tensors log before they raise them",
    ),
    GlobalState(
        "gc.disable",
        "autosplit/backends/backend.py",
        "collects once after a trace instead of many times during it",
    ),
    GlobalState(
        "gc.freeze",
        "autosplit/backends/backend.py",
        "collects after a trace what the trace has made, without a scan of older objects",
    ),
    # Registered for the life of the process.
    GlobalState("torch.library.Library", "passes/subgraph.py", "operators that call subgraphs"),
    GlobalState("torch.library.Library", _READS, "operators that read values at run time"),
    GlobalState(
        "torch.library.Library",
        "autosplit/capture/backward_writes.py",
        "the operator that reads state which a backward writes",
    ),
    GlobalState(
        "register_pytree_node",
        "autosplit/torch_internals/pytree.py",
        "flattens inputs that contain objects with tensors",
    ),
    # Locks and variables of autosplit, at the top level of a module.
    GlobalState(
        "threading.RLock",
        "autosplit/runtime/build.py",
        "two threads must not trace at once: the rows above are process-global",
    ),
    GlobalState(
        "threading.RLock",
        "autosplit/autograd/lazy_gradient.py",
        "a parameter's slot for a lazy gradient changes hands between threads",
    ),
    # Registered for the life of an object, or while a context is open.
    GlobalState(
        "register_optimizer_step_pre_hook",
        "autosplit/autograd/pending.py",
        "computes pending weight gradients before any optimizer's step",
    ),
    GlobalState(
        "register_optimizer_step_post_hook",
        "autosplit/runtime/check.py",
        "AUTOSPLIT_CHECK=1 reports written memory after a step",
    ),
    GlobalState(
        "register_module_parameter_registration_hook",
        "autosplit/planner/meta_model.py",
        "builds a model on the meta device",
    ),
    # The process of a rank, which autosplit starts or sets up.
    GlobalState(
        "os.environ.update", _GROUP, "lets process groups listen on the loopback interface"
    ),
    GlobalState("torch.cuda.set_device", _GROUP, "each rank uses its local device"),
    GlobalState("os.environ.update", _LAUNCH, "rank, world size and address of the group"),
    GlobalState(
        "signal.signal",
        "autosplit/recorder/flight.py",
        "lets SIGUSR1 write a step of the run; close() restores the earlier handler",
    ),
    GlobalState("signal.signal", _LAUNCH, "the parent process ends its ranks on Ctrl-C"),
    GlobalState("torch.set_num_threads", _LAUNCH, "the threads that the job asks for"),
    GlobalState(
        "torch.set_num_threads",
        "autosplit/recorder/replay.py",
        "the threads of the recorded run, while a replay runs its actions",
    ),
)

ON_OBJECTS = (
    GlobalState(
        "vars(tensor)[_OWN_WRITES]",
        "autosplit/runtime/residuals.py",
        "the number of writes by graphs into a tensor that a backward writes",
    ),
    GlobalState(
        "setattr(traced, attribute, root._buffers[buffer])",
        "autosplit/capture/parameter_attributes.py",
        "attributes of a parameter, on the tensor that is traced in its place",
    ),
    GlobalState(
        "parameter.__dict__[self._mark]",
        "autosplit/autograd/pending.py",
        "keeps pending weight gradients alive as long as their parameter",
    ),
    GlobalState(
        "table[key] = muted",
        "autosplit/torch_internals/group_hooks.py",
        "hooks that count gradients within one run of the engine wait for the second run",
    ),
    GlobalState(
        "parameter.__dict__[_LATE]",
        "autosplit/autograd/late_hooks.py",
        "the sum of gradients that several graphs computed for one parameter",
    ),
    GlobalState(
        "setattr(tensor, _OTHER_MEMORY, True)",
        "autosplit/torch_internals/state.py",
        "marks tensors whose owner may exchange their memory",
    ),
    GlobalState(
        "torch_function_mode_stack_state_mgr",
        _DYNAMO,
        "keeps the function modes that a capture inside of a compilation loses",
        "2.12 on",
        "pytorch/pytorch#133130",
    ),
    GlobalState(
        "._dispatch_cache.clear()",
        _OPERATORS,
        "drops dispatch caches, which ignore kernels that users register later",
    ),
    GlobalState(
        "ThreadPoolExecutor(1)",
        "autosplit/torch_internals/autograd.py",
        "reads the dispatch keys of a fresh thread, once at import; the thread ends there",
    ),
)
"""Attributes that autosplit adds to the user's objects, and other changes, named by a piece of the
file's text."""


def patched(
    owner: object, name: Any, replacement: Any, *, create: bool = False
) -> AbstractContextManager[Any]:
    """Context in which an attribute of torch, or an entry of one of its dictionaries, is replaced.

    Each use needs a row in ``STATE``.

    Args:
        owner: a module, class or dictionary of torch.
        name: the attribute's name, or the dictionary's key.
        replacement: the value inside of the context.
        create: whether the attribute may be missing.
    """
    if isinstance(owner, MutableMapping):
        return patch.dict(owner, {name: replacement})
    return patch.object(owner, name, replacement, create=create)
