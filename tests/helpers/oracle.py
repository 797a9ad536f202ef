"""The experts written the obvious way, for autodiff: every expert computes every token, a mask chooses what counts."""

import jax
import jax.numpy as jnp


def silu(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, *, act=silu, biases=(0, 0)):
    """y[t] = sum_k topk_weights[t, k] * expert topk_experts[t, k] of x[t]. Takes E times the work and memory."""
    h = jnp.einsum("td,end->ten", x, w_gate_up.astype(x.dtype)) + biases[0]
    y = jnp.einsum("tei,edi->ted", act(*jnp.split(h, 2, axis=-1)), w_down.astype(x.dtype)) + biases[1]
    # one_hot of an id outside [0, E) is all zeros: nobody computes it.
    weight_of_expert = jnp.sum(jax.nn.one_hot(topk_experts, w_down.shape[0], dtype=x.dtype) * topk_weights[..., None], axis=1)
    return jnp.einsum("ted,te->td", y, weight_of_expert.astype(x.dtype))


def gate_up(x, w_gate_up, topk_experts):
    """h[r] = w_gate_up[e(r)] x[token(r)], rows sorted by expert and then by token; expert ids within range."""
    order = jnp.argsort(topk_experts.reshape(-1), stable=True)
    return jnp.einsum("rd,rnd->rn", x[order // topk_experts.shape[1]], w_gate_up[topk_experts.reshape(-1)[order]])


def down(act, w_down, weights, topk_experts):
    """y[t] = sum_k weights[t, k] * w_down[e] act[row of (t, k)]; expert ids within range."""
    row_of_pair = jnp.argsort(jnp.argsort(topk_experts.reshape(-1), stable=True))
    y = jnp.einsum("ri,rdi->rd", act[row_of_pair], w_down[topk_experts.reshape(-1)])
    return jnp.sum(weights[..., None] * y.reshape(*weights.shape, -1), axis=1)
