"""The page of this benchmark."""

from __future__ import annotations

import dataclasses

from ..page import Page, Part, option
from . import beside, buckets, collectives, experts, gathers, last_weights, reductions

_PAGE = """\
# Meshes: pipelines with replicas

Written by `python -m benchmarks.mesh`. {environment}
{sections}
## Again

```sh
{commands}
```
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to measure."""

    steps: int = option(5, "timed steps of each case")


PARTS: dict[str, Part[Settings]] = {
    "collectives": Part(
        "Collectives of a stage behind its weight gradients",
        "A tensor-parallel model of three attention and three MLP blocks on two ranks, whose "
        "all-reduces end 0, 0.5, 1 and 2 times as long after they began as a weight gradient's "
        "product takes, one after another. So that all ways have the same to hide, matrix products "
        "sleep for their floating-point operations (2 ms for a weight gradient of an MLP) and "
        "compute nothing here; that gradients have the bits of eager mode is tried before, with "
        "torch's kernels. Hidden is all of the collectives' time in a backward, without what waits "
        "took of it. No order of the operators waits less than a bound by the graph's dependences "
        "and the times of its operators, each measured alone: what can be hidden is the rest. The "
        "goal is 90 % of that; what misses it is bold. Where nothing is said, split chooses the "
        "weight gradients that I computes for the time that it estimates for a collective, about "
        "half of such a product: over slower links some are left to W that could have hidden one. "
        "Measured is `overlap=measure_collectives(mesh)`, measured over that link and with these "
        "products by ranks of their own. W in I is the share of the weight gradients' FLOPs that I "
        "computes. Inductor, also with its own reordering of collectives, is beside it.",
        lambda settings: collectives.measure(settings.steps),
        collectives.render,
    ),
    "exchanges": Part(
        "Dispatch and combine behind weight gradients",
        "The same of a mixture of three attention and three expert layers on two ranks along ep, "
        "whose all-to-alls are delayed and whose products sleep likewise (2 ms for a weight "
        "gradient of a rank's experts). Attention has no collectives: its weight gradients, which "
        "run as one, fill waits outside of it. Estimates take these links for much faster ones, "
        "over which nothing of such a size would hide.",
        lambda settings: collectives.measure(settings.steps, experts.MIXTURE),
        collectives.render,
    ),
    "buckets": Part(
        "Buckets of DistributedDataParallel",
        "When buckets are reduced, as shares of the backward, on two ranks that average the "
        "gradients of eight MLP blocks in buckets of 3 MiB. Medians of steps in turns, after "
        "three. Shares more than ten points from those of the plain model are bold.",
        lambda settings: buckets.measure(settings.steps),
        buckets.render,
    ),
    "reductions": Part(
        "Reductions of replicas behind weight gradients",
        "A step of four microbatches of two stages with two replicas (pp 2 x dp_replicate 2). Each "
        f"stage has {reductions.LAYERS} layers and as many buckets. Four processes share two "
        f"cores, so products sleep ({1e3 * reductions.PRODUCT:.0f} ms each in F, I and W), and so "
        "do waits for a bucket's all-reduce, which ends the given time after it began or after "
        "the one before. Hidden is all of the reductions' time without that in which the rank "
        "waited, on the rank that waited most; what Gloo itself takes is not in it. What the last "
        "W of a stage can hide follows from these times: its last bucket is complete at its end. "
        "The same trainer with all reductions after the actions takes turns with it. Less than "
        "90 % where W is long enough, and ratios above 1, are bold.",
        lambda settings: reductions.measure(settings.steps),
        reductions.render,
    ),
    "gradients": Part(
        "Bytes of gradients",
        f"The most bytes that a step of two microbatches allocates, of {reductions.DEEP} layers "
        "with one sample a microbatch, over the bytes of the gradients; activations are in it.",
        lambda settings: reductions.measure_bytes(),
        reductions.render_bytes,
    ),
    "last_weights": Part(
        "The order of the last Ws",
        f"Simulated steps of {last_weights.STAGES} stages on {last_weights.RANKS} ranks and "
        f"{last_weights.MICROBATCHES} microbatches, with F = I = W = 1 and two buckets a stage: by "
        "how much reductions make a step longer, in times of a W. Before Ws at the end of a row "
        "ran stage by stage they were mixed; by costs is the order that schedule='auto' takes.",
        lambda settings: last_weights.measure(),
        last_weights.render,
    ),
    "gathers": Part(
        "Gathered parameters",
        "A model of twelve MLP blocks in four stages, pp 2 x dp_shard 2, interleaved, four "
        "microbatches, each block a group of fully_shard, under FSDP2's hooks alone (each rank's "
        "row, action by action, without messages), torch's ScheduleInterleaved1F1B, and our "
        "trainer. Gathered are parameters from the start of their all-gather to their release, at "
        "most, on the rank with the most; what is more than 1.1 of FSDP2's is bold. Waits for "
        "all-gathers are those of a step, the median, on the rank with the longest, while "
        "all-gathers end later than they would. On CPUs FSDP2's hooks start each all-gather of a "
        "forward where they wait for it. Four processes share two cores, so that waits contain "
        "those for a core; waits for the delay do not.",
        lambda settings: gathers.measure(settings.steps),
        gathers.render,
    ),
    "beside": Part(
        "Beside torch's stages",
        "Forward, backward and reduction of a batch of four microbatches, by torch's schedules "
        "with its own stages, by the same with ours, and by our trainer under the schedule of "
        "that name (`ScheduleInterleavedZeroBubble` is interleaved). A model of eight blocks; "
        "stages are wrapped by DistributedDataParallel along dp_replicate (ours reduces by "
        "itself), sharded by fully_shard, block by block, along dp_shard (ZeRO-2 over "
        "microbatches) and shared by parallelize_module along tp. Contenders take turns, first "
        "to last and last to first; ratios are those of each round's steps, and a step is its "
        "slowest rank's. The peak is what a step allocates at most on a rank beyond the "
        "gradients that it leaves: activations, gathered parameters and buckets, but not those "
        "of DistributedDataParallel, which keeps its own between steps; the least of three steps, "
        "as threads of Gloo keep what collectives were given until they get a core. Ratios above 1 "
        "are bold. "
        "Ranks share two cores, so that waits are worth little here: whoever waits lends its core.",
        lambda settings: beside.measure(settings.steps),
        beside.render,
    ),
}


PAGE = Page("mesh", _PAGE, PARTS, Settings)
