"""Workarounds for code whose captured or traced graph computes something else than the code, or
that is slow to trace.

Each row names the versions of torch that need the workaround (of 2.11 to 2.15, as far as tried) and
the test that fails without it. Once torch is fixed, the workaround can go.

| defect | where | torch | workaround | test |
|---|---|---|---|---|
| hooks on tensors that a forward did not compute are lost | Dynamo | all | `refuse_lost_hooks` |
  tests/capture/workarounds/test_tensor_hooks.py |
| a ``deque(maxlen=n)`` that a forward writes has no maximum | Dynamo | 2.13 |
  `refuse_written_deques` | tests/capture/workarounds/test_deques.py |
| functions with ``set_materialize_grads(False)`` get zeros for None | Dynamo | all |
  `refuse_absent_gradients` | tests/semantics/operators/test_custom_ops.py |
| gradients of tensors that custom functions write in place are zeros | Dynamo | 2.11 |
  `return_tensors_once` | tests/semantics/operators/test_custom_ops.py |
| default devices fail guards | Dynamo | 2.12 on | `keep_function_modes` |
  tests/capture/workarounds/test_function_modes.py |
| function modes of a call act on Dynamo's graph again | AOTAutograd | all |
  `without_function_modes` | tests/capture/workarounds/test_function_modes.py |
| graph modules replace their own capture | Dynamo | all | `detach_graph_attributes` |
  tests/capture/workarounds/test_graph_modules.py |
| scans are unrolled for minutes | Dynamo | all | `limit_unrolling` |
  tests/capture/workarounds/test_long_loops.py |
| captured custom functions cannot be captured again | Dynamo | 2.13 on | `make_traceable` |
  tests/planner/test_captured_model.py |
| a second capture looks up numbers of the first capture | Dynamo | 2.13 | `forget_traced_values` |
  tests/planner/test_numbers_of_data.py |
| transformers makes masks for an export that it omits otherwise | Dynamo | all |
  `decide_masks_statically` | tests/capture/workarounds/test_masks_left_out.py |
| transformers reads its configuration several times a layer, slowly | Dynamo | all |
  `read_layer_configs_once` | tests/capture/workarounds/test_cache_layers.py |
| files of traced functions are tokenized for a log that is off | Dynamo | all |
  `skip_function_names` | tests/capture/workarounds/test_function_names.py |
| comparisons that are never true import a slow module | Dynamo | all |
  `skip_local_maps` | tests/capture/workarounds/test_local_maps.py |
| each module of a slice of a module list is checked in Python, slowly | Dynamo | all |
  `slice_module_lists` | tests/capture/workarounds/test_module_slices.py |
| whether a mask is causal is read from its values | Dynamo | all | `decide_masks_statically` |
  tests/semantics/operators/test_layers.py |
| layers for quantization-aware training are not traced | Dynamo | all | `trace_quantizers` |
  tests/benchmarks/coverage/test_slice.py |
| dropout between recurrent layers is omitted; low precision rounds every step | AOTAutograd | all |
  `refuse_traced_otherwise` | tests/semantics/operators/test_layers.py |
| last states of an LSTM have an extra dimension | AOTAutograd | before 2.13 |
  `refuse_traced_otherwise` | tests/semantics/operators/test_layers.py |
| the fused recurrent kernel differs from its fake kernel | AOTAutograd | all |
  `without_fused_recurrence` | tests/semantics/operators/test_layers.py |
| margin losses have other gradients and shapes | AOTAutograd | 2.13 | `refuse_traced_otherwise` |
  tests/capture/workarounds/test_margin_losses.py |
| products of different dtypes can be traced, and fail when run | fake tensors | all |
  `refuse_mixed_dtypes` | tests/trainer/test_mistakes.py |
| checks of linear algebra thread tokens through graphs | AOTAutograd | all | `without_tokens` |
  tests/semantics/operators/test_layers.py |
| gradients of outputs that overlap themselves overwrite each other | AOTAutograd | all |
  `allow_overlapping_outputs` | tests/semantics/operators/test_in_place.py |
| an output loses its tangent beside a written buffer that has two names | AOTAutograd | all |
  `keep_output_tangents` | tests/capture/workarounds/test_repeated_modules.py |
| sizes with three factors call ``operator.mul`` with three arguments | AOTAutograd | 2.13 |
  `multiply_sizes_pairwise` | tests/capture/workarounds/test_symbolic_products.py |
| sizes of sparse gradients depend on the padding | AOTAutograd | all |
  `pad_sparse_gradients` | tests/test_stage.py |
| kernels that users register later are not traced | AOTAutograd | all |
  `trace_registered_kernels` | tests/semantics/operators/test_custom_ops.py |
"""
