"""What torch's own tests expect of a pipeline stage, expected of ours.

Read in torch 2.13's ``test/distributed/pipelining``, where most of it needs two GPUs, and said anew
for two CPU ranks over Gloo. All cases of all files share one launch of two processes; where torch's
test has one rank, both ranks run it, each by itself. "Ours" is ``SplitPipelineStage`` with its
defaults.

| torch's test | here |
|---|---|
| test_schedule: single_stage, eval_then_train | ``one_rank.py`` |
| test_schedule: grad_with_v_schedule, grad_with_split_b_w | ``one_rank.py`` |
| test_schedule: errors_with_compile | ``one_rank.py``; and ours with Inductor is none of those |
| test_schedule_multiproc: forward_only, eval_inference_mode, return_output | ``two_ranks.py`` |
| test_schedule_multiproc: multi_iter, kwargs_with_tracer, grad_with_tracer | ``two_ranks.py`` |
| test_schedule_multiproc: grad_with_manual, manual_interleaved | ``two_ranks.py`` |
| test_schedule_multiproc: v_shape_schedules, custom_function_callback | ``two_ranks.py`` |
| test_schedule_multiproc: zero_bubble_with_model_kwargs | ``two_ranks.py`` |
| test_schedule_multiproc: non_symmetric_stage_ids, custom_sched, native_zero_bubble | \
``own_orders.py`` |
| test_schedule_multiproc: weight_update_mlp_e2e; test_stage: custom_dw_with_fb_schedule | \
``own_orders.py``: of ``dw_builder`` with torch's stage; ours takes none |
| test_stage: tracer, tracer_kwargs, manual | ``two_ranks.py``; a traced module is a module |
| test_stage: output_chunks_memory_usage, shape_prop_mismatch, custom_dw_errors | ``stages.py`` |
| test_stage: metadata inference restores buffers (torch 2.15) | ``stages.py`` |
| test_backward: all that a stage shows of it | ``stages.py`` |

"Leaked tensors" are those that only a cycle of references holds; here they are looked for from the
second step on, since the first one captures.

What does not apply to a stage, with whichever schedule: the names, orders, lowering, CSV files and
validation of schedules (test_schedule: TestSchedulePlan, TestScheduleCsv, TestScheduleLowering,
TestValidateSchedule, ScheduleUtilTests, get_schedule_class), in which ours has no part; the fields
of torch's parameter groups and gradient edges (test_backward: grad_validation, from_gradient_edge,
mixed_edge_and_tensor_outputs but for its outputs without a gradient, which ``stages.py`` has),
which are of its own eager split; and what is not in torch 2.13: microbatches split beforehand, a
schedule that passes its indices, a group of processes for each edge, outputs released after their
send.
"""
