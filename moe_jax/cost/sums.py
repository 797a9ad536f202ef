"""Seconds of adding the gradients of micro-batches to their float32 sums."""

from moe_jax.cost.layer import experts_sums_seconds
from moe_jax.cost.machine import Machine
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.cost.stage import experts_work


def sums_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of all micro-batches of a step; 0 where gradients are not summed over micro-batches.

    Sums are read and written. In turn, a micro-batch has a stack of its own gradients, which is read too. Joined passes add
    each layer's gradients at once, and those of an embedding table of its own once a step. Kernels that add
    (`PlannedStep.adds_in_kernel`) hide this behind their matmuls.
    """
    if not step.accumulates:
        return 0.0
    if step.adapters is not None:
        return step.gradient_accumulation * 12 * step.adapters.parameters / machine.hbm
    traffic = 8 if step.joins_passes else 8 + BYTES[step.param_dtype]
    embeds_at_the_end = step.joins_passes and not step.config.tie_word_embeddings
    elements, layers_in_kernel = 0, 0
    for p in step.parameters:
        if step.adds_in_kernel(p):
            layers_in_kernel = max(layers_in_kernel, p.layers)
        elif not (embeds_at_the_end and p.path[0] == "embed_tokens"):
            elements += p.own_size if p.by_layer or not step.joins_passes else p.used_size
    beyond_matmuls = layers_in_kernel * experts_sums_seconds(experts_work(step), machine) if layers_in_kernel else 0.0
    return step.gradient_accumulation * (traffic * elements / machine.hbm + beyond_matmuls)
