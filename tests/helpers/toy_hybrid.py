"""A family of its own, as a user would add it: recurrent layers between attention layers, with experts in all of them.

    S_t = a_t S_(t-1) + k_t v_t^T      o_t = S_t^T q_t      a_t = sigmoid(decay_proj x_t), one number a head

S [key_dim, value_dim] begins with zeros in each document.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from moe_jax.config import Qwen3MoeConfig
from moe_jax.layers.linear import Linear
from moe_jax.layers.matrices import MATRICES, Declaration
from moe_jax.models.auto import MODEL_CLASSES, Qwen3Moe

MATRICES["decay_proj"] = Declaration("attention")


@dataclass(frozen=True)
class RecurrenceSpec:
    """The mixer of a recurrent layer: one state of each head, for a sequence."""

    heads: int
    head_dim: int

    name: ClassVar[str] = "gated linear recurrence"
    of_token: ClassVar[tuple] = ()

    @property
    def of_sequence(self):
        return ((self.heads, self.head_dim, self.head_dim),)

    def flops(self, keys):
        return 4 * self.heads * self.head_dim**2


@dataclass(frozen=True, kw_only=True)
class HybridConfig(Qwen3MoeConfig):
    """The last of `full_attention_interval` layers attends; the others are recurrent."""

    full_attention_interval: int = 3

    model_type = "toy_hybrid"

    @property
    def layer_mixers(self):
        recurrence, every = RecurrenceSpec(self.num_attention_heads, self.head_dim), self.full_attention_interval
        return tuple(recurrence if (layer + 1) % every else self.mixer for layer in range(self.num_hidden_layers))


class Recurrence(nnx.Module):
    """o_proj(o) of the module's formula, token by token."""

    def __init__(self, config, *, stack=(), param_dtype=jnp.float32, rngs):
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        options = dict(stddev=config.initializer_range, stack=stack, param_dtype=param_dtype, rngs=rngs)
        self.q_proj = Linear(hidden, heads * width, **options)
        self.k_proj = Linear(hidden, heads * width, **options)
        self.v_proj = Linear(hidden, heads * width, **options)
        self.decay_proj = Linear(hidden, heads, **options)
        self.o_proj = Linear(heads * width, hidden, **options)
        self.shape = heads, width, width

    def __call__(self, x, rope, attend):
        q, k, v = (p(x).reshape(*x.shape[:2], *self.shape[:2]) for p in (self.q_proj, self.k_proj, self.v_proj))
        decay = jax.nn.sigmoid(self.decay_proj(x)) * attend.follows()[..., None]

        def step(state, token):
            q, k, v, decay = token
            state = decay[..., None, None] * state + k[..., :, None] * v[..., None, :]
            return state, jnp.einsum("bhkv,bhk->bhv", state, q)

        (state,) = attend.states((jnp.zeros((len(x), *self.shape)),))
        state, out = lax.scan(step, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, decay)))
        return self.o_proj.of_heads(jnp.moveaxis(out, 0, 1)), attend.keep((state,))


class Hybrid(Qwen3Moe):
    """Qwen3-MoE with recurrent layers."""

    def _mixer(self, mixer, **options):
        return Recurrence(self.config, **options) if mixer.of_sequence else super()._mixer(mixer, **options)


MODEL_CLASSES[HybridConfig.model_type] = Hybrid


def hybrid(**fields):
    """Two times (recurrent, recurrent, attention)."""
    sizes = dict(vocab_size=264, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=6)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3)
    experts = dict(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    return Hybrid(HybridConfig(**{**sizes, **heads, **experts, **fields}), dtype=jnp.float32, rngs=nnx.Rngs(3))


def parameters_of_layer(params, config, layer):
    """Returns one layer's parameters, as a dictionary of dictionaries."""
    number, stage = next((n, stage) for n, stage in enumerate(config.stages) if layer in stage.layers)
    repeat, place = divmod(layer - stage.first_layer, len(stage.body))
    of_stage = params["stages"][number]
    return jax.tree.map(lambda a: a[repeat], of_stage if len(stage.body) == 1 else of_stage["places"][place])


def plain_logits(params, config, tokens, segment_ids):
    """The logits of one row of `hybrid` by loops over layers, tokens and experts, without a cache; each segment by itself.

    Args:
      params: `nnx.to_pure_dict` of the model's parameters.
    """
    eps, width = config.rms_norm_eps, config.head_dim
    starts = [t for t in range(len(tokens)) if t == 0 or segment_ids[t] != segment_ids[t - 1]]
    start = np.array([max(s for s in starts if s <= t) for t in range(len(tokens))])

    def norm(x, weight):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight["weight"]

    def heads(p, name, x):
        return (x @ p[name]["weight"].T).reshape(len(x), -1, width)

    def rotated(x):
        angles = (np.arange(len(x)) - start)[:, None] / config.rope_parameters.rope_theta ** (np.arange(0, width, 2) / width)
        cos, sin, (first, second) = np.cos(angles)[:, None], np.sin(angles)[:, None], jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def recur(p, x):
        q, k, v = (heads(p, name, x) for name in ("q_proj", "k_proj", "v_proj"))
        decay = jax.nn.sigmoid(x @ p["decay_proj"]["weight"].T)
        state, outs = 0, []
        for t in range(len(x)):
            before = 0 if t in starts else decay[t][:, None, None] * state
            state = before + k[t][:, :, None] * v[t][:, None, :]
            outs.append(jnp.einsum("hkv,hk->hv", state, q[t]))
        return jnp.stack(outs)

    def attend(p, x):
        q, k = (rotated(norm(heads(p, f"{n}_proj", x), p[f"{n}_norm"])) for n in "qk")
        v, outs = heads(p, "v_proj", x), []
        for t in range(len(x)):
            seen = slice(start[t], t + 1)
            scores = jnp.einsum("hd,nd->hn", q[t], k[seen, 0]) / width**0.5
            outs.append(jax.nn.softmax(scores) @ v[seen, 0])
        return jnp.stack(outs)

    def feed(p, x):
        values, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]["weight"].T), config.num_experts_per_tok)
        values, out = values / values.sum(-1, keepdims=True), 0
        for e in range(config.num_experts):
            gate, up = jnp.split(x @ p["experts"]["gate_up_proj"][e].T, 2, -1)
            weight = jnp.where(chosen == e, values, 0).sum(-1, keepdims=True)
            out += weight * ((jax.nn.silu(gate) * up) @ p["experts"]["down_proj"][e].T)
        return out

    x = params["embed_tokens"]["weight"][np.asarray(tokens)]
    for layer, mixer in enumerate(config.layer_mixers):
        p = parameters_of_layer(params, config, layer)
        mixed = (recur if mixer.of_sequence else attend)(p["self_attn"], norm(x, p["input_layernorm"]))
        x = x + mixed.reshape(len(x), -1) @ p["self_attn"]["o_proj"]["weight"].T
        x = x + feed(p["mlp"], norm(x, p["post_attention_layernorm"]))
    return norm(x, params["norm"]) @ params["lm_head"]["weight"].T
