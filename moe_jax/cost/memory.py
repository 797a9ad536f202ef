"""Bytes that one device needs at the peak of a training step.

Three moments may be the peak: a layer's backward pass, when nearly all gradients are there; the loss, when the vocabulary's
alone are, beside the logits of a chunk of tokens; and AdamW, when no activations are left.
"""

from moe_jax.config import Stage
from moe_jax.cost.attention import expanded_elements, kept_elements, key_value_elements, travelling_elements
from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.run import BYTES, Run
from moe_jax.kernels.cross_entropy import CHUNK_TOKENS


def memory_bytes(run: Run) -> dict[str, float]:
    """The peak by part; `workspace` is what it has beside the other four."""
    own = sum(p.own_size for p in run.parameters)
    parameters, moments = 4 * own, 2 * BYTES[run.moment_dtype] * own
    gradients = BYTES[run.param_dtype] * own
    # Of what is in the host's memory two layers' part is on its way.
    kept = sum((2 if run.remat == "offload" else stage.num_layers) * kept_by_layer(run, stage) for stage in run.stages)
    # Gradients of the model's own loss wait while a module's pass and come back.
    waiting = 4 * len(run.config.mtp_stages) * run.config.hidden_size * (run.config.vocab_size + run.tokens)
    backward = max(gradients, waiting) + kept + _backward_workspace(run)
    optimizer = gradients + _optimizer_workspace(run)
    peak = max(backward, kept + waiting + _loss_workspace(run), optimizer)
    return {
        "parameters": parameters,
        "moments": moments,
        "gradients": gradients,
        "activations": min(kept, peak - gradients),
        "workspace": peak - gradients - min(kept, peak - gradients),
    }


def host_bytes(run: Run) -> float:
    """What a device keeps in its host's memory."""
    return sum(stage.num_layers * kept_by_layer(run, stage) for stage in run.stages) if run.remat == "offload" else 0.0


def kept_by_layer(run: Run, stage: Stage) -> float:
    """What one layer of a stage keeps for its backward pass: with remat its input alone, a module's embeddings among it."""
    if not run.remat:
        return _activations(run, stage)
    return ELEMENT * run.tokens * run.config.hidden_size * (2 if run.is_module(stage) else 1)


def _activations(run: Run, stage: Stage) -> float:
    """What a layer keeps without remat.

    x and its norm; what attention keeps; x and its norm again. With experts what dispatch brought, h, and the router's
    probabilities, weights and ids; in a dense layer and of shared experts gate, up and their product. A module that predicts
    further tokens keeps what it joins, before and after the norms, and what its last norm takes.
    """
    config = run.config
    expanded = run.mesh.context == 1 or run.context_method == "ulysses"
    elements = run.tokens * (4 * config.hidden_size + kept_elements(config, expanded=expanded))
    elements += run.tokens * 5 * config.hidden_size if run.is_module(stage) else 0
    if not stage.sparse:
        return ELEMENT * (elements + run.tokens * 3 * config.intermediate_size)
    moe = run.moe_config
    elements += run.tokens * 3 * run.shared_inter
    if run.exchanges:
        elements += run.received * moe.hidden_size
    elements += run.room * 2 * moe.moe_intermediate_size
    return ELEMENT * elements + 4 * run.tokens * (moe.num_experts + 8 * moe.num_experts_per_tok)


def _backward_workspace(run: Run) -> float:
    """What one layer's backward pass has beside what is kept.

    Parameters of two layers gathered, and gradients of two; with remat the layer's activations; and what the backward pass of
    the experts makes: the rows of dy, of x or dx, dh and the weighted activation, and the gradients that travel; or that of
    attention, the gradients of all that it took and gave, if these are more. Experts that are computed in parts sum the
    gradients of their weights in f32.
    """
    config, layers = run.config, []
    of_heads = config.num_attention_heads * (config.key_dim + config.value_dim) + key_value_elements(config)
    for number, stage in enumerate(run.stages):
        own = [p for p in run.parameters if p.in_stage and p.path[1] == number]
        gathered = 4 * ELEMENT * sum(p.used_size / p.layers for p in own if p.gather_axes)
        if stage.sparse:
            moe = run.moe_config
            elements = run.computed_at_once * (2 * moe.hidden_size + 3 * moe.moe_intermediate_size)
            elements += 2 * run.received * moe.hidden_size if run.exchanges else 0
            if run.computed_at_once < run.room:
                gathered += 4 * sum(p.used_size / p.layers for p in own if "experts" in p.path)
        else:
            elements = run.tokens * 3 * config.intermediate_size
        elements = max(elements, run.tokens * of_heads)
        layers.append(gathered + ELEMENT * elements + (_activations(run, stage) if run.remat else 0))
    return max(layers) + _context_workspace(run)


def _context_workspace(run: Run) -> float:
    """What travels, of all devices with `all_gather`, of two turns in the ring, and its f32 gradients.

    Where keys and values are expanded from it, these too: of one turn in the ring.
    """
    if run.mesh.context == 1 or run.context_method == "ulysses":
        return 0
    is_ring, devices = run.context_method == "ring", run.mesh.context
    arrived, at_once = (2 * run.ring_turn, run.ring_turn) if is_ring else (devices, devices)
    elements = arrived * travelling_elements(run.config) + at_once * expanded_elements(run.config)
    return (ELEMENT + 4) * run.tokens * elements


def _loss_workspace(run: Run) -> float:
    """The vocabulary's projection, a chunk's logits and x, each with its gradient: one of the two in f32, the other in bf16."""
    vocab, hidden = run.config.vocab_size, run.config.hidden_size
    chunk = min(CHUNK_TOKENS, run.tokens)
    return (ELEMENT + 4) * (vocab * hidden + chunk * vocab + run.tokens * hidden)


def _optimizer_workspace(run: Run) -> float:
    """With f32 parameters one more array of each: inferred from the one measured row. Sums over `data` make f32 of bf16."""
    own = [p.own_size for p in run.parameters]
    summed = 4 * max(own) if run.mesh.data > 1 and run.param_dtype != "float32" else 0
    return 4 * sum(own) if run.param_dtype == "float32" else summed
