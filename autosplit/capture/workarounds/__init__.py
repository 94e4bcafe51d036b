"""Workarounds for what torch captures or traces otherwise than it runs.

Each with the versions of torch in which it is needed (as far as 2.11 to 2.15 were tried), and the
tests that fail without it; where torch is mended, it can go.

| what goes wrong | where | torch | mended here by | test |
|---|---|---|---|---|
| hooks on what a forward did not compute are lost | Dynamo | all | `refuse_lost_hooks` |
  tests/capture/workarounds/test_tensor_hooks.py |
| functions with ``set_materialize_grads(False)`` get zeros for None | Dynamo | all |
  `refuse_absent_gradients` | tests/semantics/operators/test_custom_ops.py |
| gradients of what custom functions write in place are zeros | Dynamo | 2.11 |
  `return_tensors_once` | tests/semantics/operators/test_custom_ops.py |
| default devices fail guards | Dynamo | 2.12 on | `keep_function_modes` |
  tests/capture/workarounds/test_function_modes.py |
| graph modules stand in for their own capture | Dynamo | all | `detach_graph_attributes` |
  tests/capture/workarounds/test_graph_modules.py |
| scans are unrolled for minutes | Dynamo | all | `limit_unrolling` |
  tests/capture/workarounds/test_long_loops.py |
| captured custom functions cannot be captured again | Dynamo | 2.13 on | `make_traceable` |
  tests/planner/test_captured_model.py |
| transformers makes masks for an export that it leaves out else | Dynamo | all |
  `decide_masks_statically` | tests/capture/workarounds/test_masks_left_out.py |
| whether a mask is causal is asked of its values | Dynamo | all | `decide_masks_statically` |
  tests/semantics/operators/test_layers.py |
| layers for quantization that is trained for are not entered | Dynamo | all | `trace_quantizers` |
  tests/benchmarks/coverage/test_slice.py |
| dropout between recurrent layers is left out; coarse ones round every step | AOTAutograd | all |
  `refuse_traced_otherwise` | tests/semantics/operators/test_layers.py |
| last states of an LSTM have a dimension too many | AOTAutograd | before 2.13 |
  `refuse_traced_otherwise` | tests/semantics/operators/test_layers.py |
| the fused recurrent kernel is not as its fake | AOTAutograd | all | `without_fused_recurrence` |
  tests/semantics/operators/test_layers.py |
| margin losses have other gradients and shapes | AOTAutograd | 2.13 | `refuse_traced_otherwise` |
  tests/capture/workarounds/test_margin_losses.py |
| products of different dtypes pass, and fail when run | fake tensors | all |
  `refuse_mixed_dtypes` | tests/trainer/test_mistakes.py |
| checks of linear algebra thread tokens through graphs | AOTAutograd | all | `without_tokens` |
  tests/semantics/operators/test_layers.py |
| gradients of outputs that overlap themselves overwrite each other | AOTAutograd | all |
  `allow_overlapping_outputs` | tests/semantics/operators/test_in_place.py |
| sizes of three factors call ``operator.mul`` with three | AOTAutograd | 2.13 |
  `multiply_sizes_pairwise` | tests/capture/workarounds/test_symbolic_products.py |
| sizes of sparse gradients depend on where there is padding | AOTAutograd | all |
  `pad_sparse_gradients` | tests/test_stage.py |
| kernels registered later are not traced | AOTAutograd | all | `trace_registered_kernels` |
  tests/semantics/operators/test_custom_ops.py |
"""
