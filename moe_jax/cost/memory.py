"""Bytes that one device needs at the peak of a training step.

The peak is one of three moments:

    a layer's backward pass    nearly all gradients exist
    the loss                   only the vocabulary's gradients exist, and the logits of a chunk of tokens
    AdamW                      no activations are left

With several micro-batches float32 sums of all gradients exist throughout. Where passes are joined (`PlannedStep.joins_passes`),
layers add to the sums directly, and several micro-batches are in flight. The functions below count a layer's residuals and its
workspace.
"""

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

from moe_jax.config import Stage
from moe_jax.cost.parameters import BYTES, ELEMENT, FP8_ELEMENT, FP8_ROW_ELEMENT, Parameter, dealt_out, shapes
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT
from moe_jax.kernels.vocabulary import CHUNK_TOKENS
from moe_jax.layers.matrices import declaration_of, is_orthogonalised
from moe_jax.models.remat import KeptPart

ADAPTER_RANKS = 64
"""Ranks of an expert's adapter in the kernels: smaller ones are padded."""


def memory_bytes(step: PlannedStep) -> dict[str, float]:
    """Returns each part of the peak device memory, in bytes. `workspace` is the peak minus the other four parts."""
    of_param = BYTES[step.param_dtype]
    own = sum(p.own_size * (p.quantised or of_param) for p in step.parameters)
    if step.adapters is not None:
        parameters = own + 4 * step.trained
        held = _of_joined_passes(step) if step.joins_passes else _of_adapters(step)
    else:
        # With bf16 parameters, the other halves of the masters are laid out like the moments.
        parameters = own + (4 - of_param) * sum(elements for *_, elements in step.updated)
        held = _of_joined_passes(step) if step.joins_passes else _of_passes_in_turn(step)
    kept = min(held.kept, held.peak - held.gradients)
    return {
        "parameters": parameters,
        "moments": BYTES[step.moment_dtype] * num_moments(step),
        "gradients": held.gradients,
        "activations": kept,
        "workspace": held.peak - held.gradients - kept,
    }


def num_moments(step: PlannedStep) -> float:
    """Returns the number of the optimizer's moments that a device stores (`train.optimizer`)."""

    def of_element(path: tuple, shape: tuple[int, ...]) -> float:
        if step.optimizer == "adafactor":
            return 1 if declaration_of(path, shape).axes == 1 else 1 / shape[-1] + 1 / shape[-2]
        return 1 if step.optimizer == "muon" and is_orthogonalised(path, shape) else 2

    return sum(of_element(path, shape) * elements for path, shape, elements in step.updated)


def with_most_kept(step: PlannedStep, memory: float) -> PlannedStep:
    """Returns the step with remat in which as many last layers keep their residuals as fit into `memory` bytes, or none."""

    def bytes_of(num_kept: int) -> float:
        return sum(memory_bytes(replace(step, remat=True, num_kept=num_kept)).values())

    return replace(step, remat=True, num_kept=bisect_right(range(1, step.num_layers + 1), memory, key=bytes_of))


class _Held(NamedTuple):
    """Bytes in addition to parameters and moments."""

    gradients: float
    kept: float
    """Residuals of layers."""
    peak: float


def _of_adapters(step: PlannedStep) -> _Held:
    """Returns the bytes of a step that trains adapters: frozen weights have no gradients, and the head's is not computed.

    The sums of micro-batches coexist with a micro-batch's gradients. AdamW uses one more array for each adapter.
    """
    trained = 4 * step.trained
    gradients = trained * (2 if step.accumulates else 1)
    kept = _kept_in_turn(step)
    dequantised = max(quantised_layer(step, number)[1] for number, _ in enumerate(step.stages))
    outside = ELEMENT * sum(p.used_size for p in step.parameters if p.gather_axes and not p.by_layer)
    passes = max(dequantised + backward_bytes(step), kept + outside + loss_workspace(step, step.tokens))
    return _Held(gradients, kept, gradients + max(passes, trained))


def _of_passes_in_turn(step: PlannedStep) -> _Held:
    """Returns the bytes if micro-batches run in turn; with several, the sums and one micro-batch's gradients exist."""
    config, own = step.config, sum(p.own_size for p in step.parameters)
    sums, added_in_place = 0.0, 0
    if step.gradient_accumulation > 1:
        sums, added_in_place = 4 * own, sum(p.own_size for p in step.parameters if p.adds_in_kernel)
    gradients = BYTES[step.param_dtype] * (own - added_in_place)
    kept = _kept_in_turn(step)
    # Gradients of the model's own loss stay in memory during the passes of the MTP modules.
    waiting = 4 * len(config.mtp_stages) * config.hidden_size * (config.vocab_size + step.tokens)
    copies = copies_bytes(step)
    of_head = config.vocab_size * config.hidden_size
    # On one device the pass that reads the head's gradient also rounds it: until then it is float32.
    unrounded = (4 - BYTES[step.param_dtype]) * of_head if step.mesh.size == 1 else 0
    backward = max(gradients, waiting) + unrounded + copies + backward_bytes(step)
    head = (ELEMENT + 4) * of_head
    loss = kept + copies + waiting + head + loss_workspace(step, step.tokens)
    optimizer = (0 if sums else gradients) + optimizer_workspace(step)
    return _Held(sums + gradients, kept, sums + max(backward, loss, optimizer))


def _of_joined_passes(step: PlannedStep) -> _Held:
    """Returns the bytes if forward and backward passes are joined, with or without a pipe.

    Arrays that are gathered once a step are whole on every device, as are their sums. A slot keeps the residuals of one chunk.
    Stages other than the joined one keep at most two micro-batches per rank, and a rank holds its share of their rows. A module
    keeps one, because its passes run in turn. The gradients of all embedded tokens are kept until the end.
    """
    config, number, ticks = step.config, step.joined_stage, step.ticks
    stage, ranks = step.stages[number], step.mesh.pipe
    frozen = step.adapters is not None
    sums = 4 * (step.trained if frozen else sum(p.own_size if p.by_layer else p.used_size for p in step.parameters))
    replicated: float = ELEMENT * sum(p.used_size for p in step.parameters if p.gather_axes and not p.by_layer)
    own_tokens = step.tokens / ranks
    embedded = ELEMENT * step.gradient_accumulation * own_tokens * config.hidden_size
    of_chunk = step.layers_of_chunk * kept_by_layer(step, stage)
    # Number of chunks whose products wait for W.
    products = ranks - 1 if step.pipe_schedule == "uniform-w" else 0
    if ticks is not None:
        kept = (ticks.slots["saved"] + 1) * of_chunk
        # One slot of each kind receives unused results.
        kept += (ticks.slots["input"] + ticks.slots["gradient"] + 2) * ELEMENT * step.tokens * config.hidden_size
        products = ticks.slots["product"]
        # A rank of DualPipe computes two ranks' layers, and holds both sets of parameters and sums.
        in_layers = sum(p.own_size for p in step.parameters if p.by_layer)
        replicated += ELEMENT * (1 + ticks.copies) * in_layers if ticks.copies else 0
        sums += 4 * in_layers if step.pipe_schedule == "dualpipe" and not frozen else 0
    elif step.offloads_slots:
        # A whole chunk is copied back from the host's memory at once.
        kept = of_chunk
    elif ranks > 1:
        # Passes masked out of a tick have a slot of their own, and a backward pass reads a copy of its slot.
        kept = (step.slots + 2) * of_chunk
    else:
        kept = step.slots * kept_by_stage(step, number)
    if products:
        kept += products * step.layers_of_chunk * ELEMENT * operand_elements(step)
    # The forward pass of a tick has its own gathered layers, and produces the residuals of a layer.
    workspaces = [layer_workspace(step, number) + 2 * gathered_layer(step, number) + activations(step, stage)]
    for other, own in enumerate(step.stages):
        if other != number:
            outside = step.outside_pipe
            kept += _in_flight(step, own) * kept_by_stage(outside, other)
            gathers = gathered_layers(outside, other) if ranks > 1 else 0
            workspaces.append(layer_workspace(outside, other) - gathers)
    waiting = 4 * len(config.mtp_stages) * config.hidden_size * own_tokens
    passes = max(max(workspaces) + context_workspace(step), loss_workspace(step, own_tokens)) + waiting
    passes += replicated + embedded + kept + copies_bytes(step)
    return _Held(sums, kept, sums + max(passes, optimizer_workspace(step)))


def operand_elements(step: PlannedStep) -> int:
    """Returns the elements of the operands of all weight gradients of a layer in a pipe (`layers.tickets`).

    A matrix that is gathered layer by layer has no ticket.
    """
    elements, gathered = 0, {p.path for p in step.parameters if p.gather_axes}
    for path, shape in shapes(step.config):
        matrix = declaration_of(path, shape)
        if path in gathered or path[:2] != ("stages", dealt_out(step.config).stage) or matrix.axes == 1:
            continue
        if matrix.role == "experts":
            # One side of each product has a row for each choice, the other a row for each token.
            per_choice = shape[-2] if path[-1].startswith("gate_up") else shape[-1]
            elements += step.room * per_choice + step.received * step.config.hidden_size
        else:
            elements += step.tokens * (shape[-2] + shape[-1])
    return elements


def host_bytes(step: PlannedStep) -> float:
    """Returns the bytes of host memory that one device uses for offloaded activations; 0 unless `remat` is "offload"."""
    if step.remat != "offload":
        return 0.0
    if not step.offloads_slots:
        layers = sum(stage.num_layers * kept_by_layer(step, stage) for stage in step.stages)
        return (step.slots if step.joins_passes else 1) * layers
    # Passes masked out of a tick have a slot of their own.
    kept = (step.slots + 1) * step.layers_of_chunk * kept_by_layer(step, step.stages[step.joined_stage])
    others = [stage for number, stage in enumerate(step.stages) if number != step.joined_stage]
    return kept + sum(_in_flight(step, own) * own.num_layers * kept_by_layer(step.outside_pipe, own) for own in others)


def _in_flight(step: PlannedStep, stage: Stage) -> int:
    """Returns how many micro-batches of residuals a stage other than the joined one holds at once."""
    return 1 if step.is_module(stage) else min(2 * step.mesh.pipe, step.gradient_accumulation)


def _kept_in_turn(step: PlannedStep) -> float:
    """Returns the bytes of residuals of all layers for one micro-batch."""
    return sum(kept_by_stage(step, number) for number, _ in enumerate(step.stages))


def kept_by_stage(step: PlannedStep, number: int) -> float:
    """Returns the bytes of residuals of a stage's layers in the device's memory. With "offload" these are two inputs."""
    stage, num_kept = step.stages[number], step.kept_layers(number)
    recomputed = 2 if step.remat == "offload" else stage.num_layers - num_kept
    return recomputed * kept_by_layer(step, stage) + num_kept * activations(step, stage)


def kept_by_layer(step: PlannedStep, stage: Stage) -> float:
    """Returns the bytes of residuals that one layer of a stage keeps for its backward pass, with the step's `remat`.

    With remat this is only its input and the parts in `keep` (except in the last `num_kept` layers); an MTP module's input
    includes embeddings.
    """
    if not step.remat:
        return activations(step, stage)
    of_input = ELEMENT * step.tokens * step.config.hidden_size * (2 if step.is_module(stage) else 1)
    return of_input + kept_parts(step, stage)


def kept_parts(step: PlannedStep, stage: Stage) -> float:
    """Returns the bytes of the parts that a recomputed layer keeps."""
    return sum(size for part, size in bytes_of_parts(step, stage).items() if part in step.keep)


def bytes_of_parts(step: PlannedStep, stage: Stage) -> dict[KeptPart, float]:
    """Returns the bytes of each part of a layer's residuals that recomputation can leave out (`models.remat`).

    Attention keeps its output and a float32 sum for each query; the router keeps the chosen ids. Experts keep the rows of h
    with each expert's padding, their plan, and the rows between the factors of adapters.
    """
    mixer = step.mixer
    sizes: dict[KeptPart, float] = {"attention": step.tokens * mixer.heads * (ELEMENT * mixer.value_dim + 4)}
    if stage.sparse:
        k, rows = step.experts.num_experts_per_tok, rows_of_experts(step)
        sizes["router"] = 4 * step.tokens * k
        of_hidden = FP8_ROW_ELEMENT if step.precision == "fp8_kept" else ELEMENT
        between = 2 * ELEMENT * ADAPTER_RANKS if step.adapters is not None and step.adapters.on_experts else 0
        sizes["experts"] = rows * (of_hidden * 2 * step.experts.moe_intermediate_size + 4 * 3 + between) + 4 * step.received * k
    return sizes


def rows_of_experts(step: PlannedStep) -> int:
    """Returns the rows of h in one layer, with each expert's padding."""
    return step.room + step.experts.num_experts // step.mesh.expert * (ROW_ALIGNMENT - 1)


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
    dispatched = step.token_bytes * step.received * config.hidden_size if step.exchange else 0
    rows = rows_of_experts(step)
    of_hidden = FP8_ROW_ELEMENT if step.precision == "fp8_kept" else ELEMENT
    hidden = of_hidden * rows * 2 * experts.moe_intermediate_size
    if step.adapters is not None and step.adapters.on_experts:
        # The rows between both factors of both matrices, padded to the tile's ranks.
        hidden += 2 * ELEMENT * rows * ADAPTER_RANKS
    narrow = step.tokens * (step.mixer.heads + 2 * experts.num_experts + 5 * experts.num_experts_per_tok) + 3 * rows
    return hidden + dispatched + ELEMENT * elements + 4 * narrow


def backward_bytes(step: PlannedStep) -> float:
    """Returns the bytes of residuals and of a layer's workspace in the backward passes, for the stage that needs most.

    Layers that keep their residuals run backward first. Their residuals are gone when a layer is recomputed.
    """
    all_kept = sum(
        step.kept_layers(number) * activations(step, stage) for number, stage in enumerate(step.stages) if step.remat
    )
    kept, context = _kept_in_turn(step), context_workspace(step)
    return context + max(
        kept - min(all_kept, recomputed_bytes(step, number)) + layer_workspace(step, number)
        for number, _ in enumerate(step.stages)
    )


def layer_workspace(step: PlannedStep, number: int) -> float:
    """Returns the bytes that one layer's backward pass needs beyond the residuals of all layers.

    These are the gathered parameters of two layers and the gradients of two layers, and the activations of a recomputed layer.
    The larger of two workspaces is added. The experts' backward pass holds rows of dy, of x or dx, dh and the weighted
    activation, and the gradients that travel. Attention's backward pass holds gradients of all its inputs and outputs. Experts
    that are computed in chunks accumulate the gradients of their weights in float32.
    """
    config, stage = step.config, step.stages[number]
    head_elements = step.mixer.head_elements + step.mixer.key_value_elements
    gathered = gathered_layers(step, number) + rounding_bytes(step, number)
    if stage.sparse:
        inter = step.experts.moe_intermediate_size
        elements: float = step.computed_at_once * (2 * config.hidden_size + 3 * inter)
        elements += 2 * step.received * config.hidden_size if step.exchange else 0
        if step.adapters and step.adapters.on_experts:
            # The gradients of experts' adapters read rows of x too. Factors, in float32, are padded to the tile's ranks.
            elements += step.computed_at_once * config.hidden_size
            gathered += 4 * step.experts.num_experts * ADAPTER_RANKS * (2 * config.hidden_size + 3 * inter)
        # dh in FP8, in addition to dh.
        elements += step.computed_at_once * inter * FP8_ROW_ELEMENT if step.precision != "bf16" else 0
        if step.computed_at_once < step.room and step.adapters is None:
            own = step.parameters_of_stages[number]
            gathered += 4 * sum(p.used_size / p.layers for p in own if "experts" in p.path)
    else:
        elements = step.tokens * 3 * config.intermediate_size
    elements = max(elements, step.tokens * head_elements)
    return gathered + ELEMENT * elements + recomputed_bytes(step, number)


def recomputed_bytes(step: PlannedStep, number: int) -> float:
    """Returns the bytes of residuals that the backward pass of one layer of stage `number` computes again."""
    stage = step.stages[number]
    return activations(step, stage) - kept_parts(step, stage) if step.kept_layers(number) < stage.num_layers else 0.0


def gathered_layer(step: PlannedStep, number: int) -> float:
    """Returns the bytes of one layer's all-gathered matrices, for stage `number`."""
    return sum(p.travelling_bytes * elements for p, elements in _gathered(step, number))


def gathered_layers(step: PlannedStep, number: int) -> float:
    """Returns the bytes of two layers' all-gathered matrices, and of trained matrices' gradients, for stage `number`."""
    of_gradient = ELEMENT if step.adapters is None else 0
    return 2 * sum((p.travelling_bytes + of_gradient) * elements for p, elements in _gathered(step, number))


def _gathered(step: PlannedStep, number: int) -> list[tuple[Parameter, float]]:
    """Returns the parameters that a layer of stage `number` gathers, with the elements of one layer."""
    own = step.parameters_of_stages[number]
    return [(p, p.used_size / p.layers) for p in own if p.gather_axes and p.by_layer]


def copies_bytes(step: PlannedStep) -> float:
    """Returns the bytes of the FP8 copies of expert matrices that are made once per step, including transposed copies."""
    return 2 * FP8_ELEMENT * sum(p.own_size for p in step.parameters if p.fp8 == "once")


def rounding_bytes(step: PlannedStep, number: int) -> float:
    """Returns the bytes of FP8 matrices that the backward pass of one layer of stage `number` creates.

    Matmuls read a matrix in two layouts. One of them needs no copy if the matrix is gathered or frozen in FP8.
    """
    made = {"pass": 2, "arrives": 1, "frozen": 1}
    return FP8_ELEMENT * sum(made.get(p.fp8 or "", 0) * p.used_size / p.layers for p in step.parameters_of_stages[number])


def quantised_layer(step: PlannedStep, number: int) -> tuple[float, float]:
    """Returns the bytes of one layer's quantised matrices: as stored, plus dequantised.

    Experts that multiply in FP8 are not dequantised.
    """
    own = [p for p in step.parameters_of_stages[number] if p.quantised and not p.fp8]
    stored = sum((p.quantised or 0) * p.used_size / p.layers for p in own)
    return stored, ELEMENT * sum(p.used_size / p.layers for p in own)


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
    """Returns the bytes of one chunk's logits and of the hidden states, each with its gradient, for `tokens` tokens.

    Of each array and its gradient, one is float32 and the other is bfloat16.
    """
    vocab, hidden = step.config.vocab_size, step.config.hidden_size
    return (ELEMENT + 4) * (min(CHUNK_TOKENS, tokens) * vocab + tokens * hidden)


def optimizer_workspace(step: PlannedStep) -> float:
    """Returns the bytes that the optimizer uses in addition to state and gradients.

    With float32 parameters it is one more array of each parameter (inferred from the one measured row). With bfloat16
    parameters, sums over the axis `data` cast each array to float32. Muon has a stack of momenta and their update.
    """
    own = [p.own_size for p in step.parameters]
    summed = 4 * max(own) if step.mesh.data > 1 and step.param_dtype != "float32" else 0
    of_muon = 8 * max(elements for *_, elements in step.updated) if step.optimizer == "muon" else 0
    return (4 * sum(own) if step.param_dtype == "float32" else summed) + of_muon
