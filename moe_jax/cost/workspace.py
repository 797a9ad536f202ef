"""Bytes that a device keeps of one layer, and bytes that it uses while it computes a layer, the loss or AdamW."""

from moe_jax.config import Stage
from moe_jax.cost.fp8 import OF_ROW_ELEMENT, gathered_bytes, hidden_bytes, rounding_bytes, travelling_bytes
from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.parameters import Parameter
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.kernels.cross_entropy import CHUNK_TOKENS
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT


def kept_by_layer(step: PlannedStep, stage: Stage) -> float:
    """Returns the bytes of residuals that one layer of a stage keeps for its backward pass.

    With remat these are its input alone; an MTP module's input includes embeddings.
    """
    if not step.remat:
        return activations(step, stage)
    return ELEMENT * step.tokens * step.config.hidden_size * (2 if step.is_module(stage) else 1)


def activations(step: PlannedStep, stage: Stage) -> float:
    """Returns the bytes of residuals that one layer keeps without remat.

    Every layer keeps x and its norm, attention's residuals and a float32 sum for each query, then x and its norm again. A
    sparse layer adds the dispatched tokens, the rows of h with each expert's padding, and the router's two float32 numbers for
    each expert. Its weights, ids and plan are a few numbers for each choice. A dense layer and shared experts add gate, up and
    their product. An MTP module adds its joined inputs before and after the norms, and the input of its last norm.
    """
    config = step.config
    expanded = step.mesh.context == 1 or step.context_method == "ulysses"
    elements = step.tokens * (4 * config.hidden_size + step.mixer.kept_elements(expanded=expanded))
    elements += step.tokens * 5 * config.hidden_size if step.is_module(stage) else 0
    if not stage.sparse:
        return ELEMENT * (elements + step.tokens * 3 * config.intermediate_size)
    experts = step.experts
    elements += step.tokens * 3 * experts.shared_intermediate_size
    dispatched = travelling_bytes(step) * step.received * config.hidden_size if step.exchanges else 0
    rows = step.room + experts.num_experts // step.mesh.expert * (ROW_ALIGNMENT - 1)
    hidden = hidden_bytes(step) * rows * 2 * experts.moe_intermediate_size
    narrow = step.tokens * (step.mixer.heads + 2 * experts.num_experts + 5 * experts.num_experts_per_tok) + 3 * rows
    return hidden + dispatched + ELEMENT * elements + 4 * narrow


def backward_workspace(step: PlannedStep) -> float:
    """Returns the bytes that the backward pass of a layer uses, at the stage that uses most."""
    return max(layer_workspace(step, number) for number in range(len(step.stages))) + context_workspace(step)


def layer_workspace(step: PlannedStep, number: int) -> float:
    """Returns the bytes that one layer's backward pass uses beside the residuals of all layers.

    These are the gathered parameters of two layers and the gradients of two layers, and with remat the layer's activations.
    The larger of two workspaces comes on top. The experts' backward pass makes rows of dy, of x or dx, dh and the weighted
    activation, and the gradients that travel. Attention's backward pass makes gradients of all its inputs and outputs.
    Experts that are computed in chunks accumulate the gradients of their weights in float32.
    """
    config, stage = step.config, step.stages[number]
    head_elements = step.mixer.head_elements + step.mixer.key_value_elements
    gathered = gathered_layers(step, number) + rounding_bytes(step, number)
    if stage.sparse:
        inter = step.experts.moe_intermediate_size
        elements: float = step.computed_at_once * (2 * config.hidden_size + 3 * inter)
        elements += 2 * step.received * config.hidden_size if step.exchanges else 0
        # dh in FP8 beside dh.
        elements += step.computed_at_once * inter * OF_ROW_ELEMENT if step.precision != "bf16" else 0
        if step.computed_at_once < step.room and step.adapters is None:
            own = step.parameters_of_stages[number]
            gathered += 4 * sum(p.used_size / p.layers for p in own if "experts" in p.path)
    else:
        elements = step.tokens * 3 * config.intermediate_size
    elements = max(elements, step.tokens * head_elements)
    return gathered + ELEMENT * elements + (activations(step, stage) if step.remat else 0)


def gathered_layer(step: PlannedStep, number: int) -> float:
    """Returns the bytes of the matrices that one layer of stage `number` gathers."""
    return sum(gathered_bytes(step, p) * p.used_size / p.layers for p in _gathered(step, number))


def gathered_layers(step: PlannedStep, number: int) -> float:
    """Returns the bytes of the gathered matrices of two layers of stage `number`, and of these matrices' gradients."""
    gradients = ELEMENT * sum(p.used_size / p.layers for p in _gathered(step, number))
    return 2 * (gathered_layer(step, number) + gradients)


def _gathered(step: PlannedStep, number: int) -> list[Parameter]:
    own = step.parameters_of_stages[number]
    return [p for p in own if p.gather_axes and p.by_layer]


def context_workspace(step: PlannedStep) -> float:
    """Returns the bytes of keys and values (or latents) from other devices, and of their float32 gradients.

    With `all_gather` these come from all devices, in the ring from two steps. Keys and values that are expanded from latents
    are added; in the ring only the keys and values of one step.
    """
    if step.mesh.context == 1 or step.context_method == "ulysses":
        return 0
    is_ring, devices = step.context_method == "ring", step.mesh.context
    arrived, at_once = (2 * step.ring_step, step.ring_step) if is_ring else (devices, devices)
    elements = arrived * step.mixer.travelling_elements + at_once * step.mixer.expanded_elements
    return (ELEMENT + 4) * step.tokens * elements


def loss_workspace(step: PlannedStep, tokens: float) -> float:
    """Returns the bytes of the logits of a chunk and of x, each with its gradient, for `tokens` tokens.

    Of each array and its gradient one is float32 and the other bfloat16.
    """
    vocab, hidden = step.config.vocab_size, step.config.hidden_size
    return (ELEMENT + 4) * (min(CHUNK_TOKENS, tokens) * vocab + tokens * hidden)


def optimizer_workspace(step: PlannedStep) -> float:
    """Returns the bytes that AdamW uses beside state and gradients.

    With float32 parameters it is one more array of each parameter (inferred from the one measured row). With bfloat16
    parameters, sums over the axis `data` cast each array to float32.
    """
    own = [p.own_size for p in step.parameters]
    summed = 4 * max(own) if step.mesh.data > 1 and step.param_dtype != "float32" else 0
    return 4 * sum(own) if step.param_dtype == "float32" else summed
