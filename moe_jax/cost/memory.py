"""Bytes that one device needs at the peak of a training step.

Three moments may be the peak: a layer's backward pass, when nearly all gradients are there; the loss, when the vocabulary's
alone are, beside the logits of a chunk of tokens; and AdamW, when no activations are left.
"""

from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.run import BYTES, Run
from moe_jax.kernels.cross_entropy import CHUNK_TOKENS


def memory_bytes(run: Run) -> dict[str, float]:
    """The peak by part; `workspace` is what it has beside the other four."""
    own = sum(p.own_size for p in run.parameters)
    parameters, moments = 4 * own, 2 * BYTES[run.moment_dtype] * own
    gradients = BYTES[run.param_dtype] * own
    kept = sum(stage.num_layers * kept_by_layer(run, stage.sparse) for stage in run.config.stages)
    backward = gradients + kept + _backward_workspace(run)
    optimizer = gradients + _optimizer_workspace(run)
    peak = max(backward, kept + _loss_workspace(run), optimizer)
    return {
        "parameters": parameters,
        "moments": moments,
        "gradients": gradients,
        "activations": min(kept, peak - gradients),
        "workspace": peak - gradients - min(kept, peak - gradients),
    }


def kept_by_layer(run: Run, sparse: bool) -> float:
    """What one layer keeps for its backward pass: with remat its input alone."""
    return ELEMENT * run.tokens * run.config.hidden_size if run.remat else _activations(run, sparse)


def _activations(run: Run, sparse: bool) -> float:
    """What a layer keeps without remat.

    x and its norm; queries and keys before and after norm and rotation, values, attention's output; x and its norm again. With
    experts what dispatch brought, h, and the router's probabilities, weights and ids; in a dense layer gate, up and their
    product.
    """
    config = run.config
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    elements = run.tokens * (4 * config.hidden_size + 3 * heads + 3 * keys)
    if not sparse:
        return ELEMENT * (elements + run.tokens * 3 * config.intermediate_size)
    moe = run.moe_config
    if run.exchanges:
        elements += run.received * moe.hidden_size
    elements += run.room * 2 * moe.moe_intermediate_size
    return ELEMENT * elements + 4 * run.tokens * (moe.num_experts + 8 * moe.num_experts_per_tok)


def _backward_workspace(run: Run) -> float:
    """What one layer's backward pass has beside what is kept.

    Parameters of two layers gathered, and gradients of two; with remat the layer's activations; and what the experts' backward
    pass makes: the rows of dy, of x or dx, dh and the weighted activation, and the gradients that travel.
    """
    gathered = 4 * ELEMENT * sum(p.used_size / p.layers for p in run.parameters if p.in_stage and p.gather_axes)
    layers = []
    for stage in run.config.stages:
        config, elements = run.config, 0
        if stage.sparse:
            moe = run.moe_config
            elements = run.room * (2 * moe.hidden_size + 3 * moe.moe_intermediate_size)
            elements += 2 * run.received * moe.hidden_size if run.exchanges else 0
        else:
            elements = run.tokens * 3 * config.intermediate_size
        layers.append(ELEMENT * elements + (_activations(run, stage.sparse) if run.remat else 0))
    return gathered + max(layers) + _context_workspace(run)


def _context_workspace(run: Run) -> float:
    """Keys and values of other devices with their f32 gradients: of two in the ring, of all with `all_gather`."""
    if run.mesh.context == 1 or run.context_method == "ulysses":
        return 0
    keys = 2 * run.tokens * run.config.num_key_value_heads * run.config.head_dim
    return (ELEMENT + 4) * keys * (2 if run.context_method == "ring" else run.mesh.context)


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
