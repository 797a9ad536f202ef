"""Multi-head latent attention (DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434, section 2.1).

A token's keys and values of all heads are expanded from one short vector, its latent, and one rotary key that the heads share.
A cache holds these kv_lora_rank + qk_rope_head_dim numbers per token, and devices send them if a sequence is split. For V3
these are 576 numbers, while all heads' keys and values are 40960.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import DeepseekV3Config
from moe_jax.kernels.low_rank import own_columns
from moe_jax.layers.attend import Attend, Expansion
from moe_jax.layers.cache import KVCache
from moe_jax.layers.linear import Linear, RMSNorm, TicketedMatrix, linear_map
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.rope import RopeTables, apply_rope, mscale_of_scores

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms on the latents, independent of `rms_norm_eps`, as in DeepSeek's code and in transformers."""


class LatentAttention(nnx.Module):
    """o_proj(attend(q, k, v)), where each head has a part without positions (nope) and a rotated part (rope):

        q            = q_b_proj(norm(q_a_proj x)), or q_proj x if q_lora_rank is None; its rope part rotated
        latent, rope = split(kv_a_proj_with_mqa x); the latent normed, the rope part rotated
        k, v         = split(kv_b_proj latent) in each head, the rope part appended to every k

    A query and a key head are wider (qk_nope_head_dim + qk_rope_head_dim) than a value head (v_head_dim).

    Few queries that see many cached tokens expand no latents: kv_b_proj = [K; V] in each head is *absorbed* (section 2.1.2),

        q_nope . (K latent) = (K^T q_nope) . latent        sum_j p_j (V latent_j) = V sum_j p_j latent_j

    This is attention of all heads to one key head, the latents, whose first kv_lora_rank numbers are its values. Tokens that
    attend only to each other are expanded: absorbing a query costs as much as expanding a key, and leaves wider heads.
    """

    def __init__(
        self, config: DeepseekV3Config, *, stack: tuple[int, ...] = (), param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        mixer = config.mixer
        linear = partial(Linear, stddev=config.initializer_range, stack=stack, param_dtype=param_dtype, rngs=rngs)
        norm = partial(RMSNorm, eps=LATENT_NORM_EPS, stack=stack, param_dtype=param_dtype)
        if config.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, mixer.heads * mixer.key_dim)
        else:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, use_bias=mixer.biases)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = linear(config.q_lora_rank, mixer.heads * mixer.key_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, mixer.latent_dim, use_bias=mixer.biases)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(mixer.rank, mixer.expansion[0])
        self.o_proj = linear(mixer.heads * mixer.value_dim, config.hidden_size, use_bias=mixer.biases)
        self.config = config
        self.scale = mixer.key_dim**-0.5 * mscale_of_scores(config.rope_parameters, config.max_position_embeddings)

    def __call__(
        self, x: Float[Array, "batch seq hidden"], rope: RopeTables, attend: Attend | PagedAttend
    ) -> tuple[Float[Array, "batch seq hidden"], KVCache | LayerPages | None]:
        """Returns the output, and the cache or pages with these tokens in it (None without either)."""
        q, latents = self.queries(x, rope), self.latents(x, rope)
        # Pages are always read as latents: there is no kernel that expands them page by page.
        if isinstance(attend, PagedAttend) or (attend.sees_cached_tokens and self.absorbing_is_cheaper(x.shape[1])):
            out, cache = attend(self.absorb(q), (latents,), Expansion(_as_one_head, ()), scale=self.scale)
            out = self.values(out)
        else:
            # Parameters are a separate argument, so that their gradients are summed over all received latents.
            matrix = self.kv_b_proj.matrix
            if matrix.ticket is not None and (attend.context is not None or attend.cache is not None):
                raise ValueError(
                    "weight tickets need keys of this call's tokens alone: no cache, no sequence split over devices"
                )
            if attend.context is not None and attend.context.method == "ulysses":
                _check_rows_of_heads(matrix)
            out, cache = attend(q, (latents,), Expansion(partial(expand, self.config), matrix), scale=self.scale)
        return self.o_proj.of_heads(out), cache

    def queries(self, x: Float[Array, "batch seq hidden"], rope: RopeTables) -> Float[Array, "batch seq heads key_dim"]:
        """Computes the queries of all heads: the part without positions, then the rotated part."""
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:-1], -1, self.config.mixer.key_dim)
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([q_nope, self._rotated(q_rope, rope)], axis=-1)

    def latents(self, x: Float[Array, "batch seq hidden"], rope: RopeTables) -> Float[Array, "batch seq latent_dim"]:
        """Computes the row to cache for each token: the latent, then the rotary key that all heads share."""
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_layernorm(latent), self._rotated(k_rope[:, :, None], rope)[:, :, 0]], axis=-1)

    def absorbing_is_cheaper(self, num_queries: int) -> bool:
        """Returns True if absorbing these queries costs fewer FLOPs than expanding keys: for V3, up to 157 queries."""
        mixer = self.config.mixer
        wider = 2 * mixer.latent_dim - mixer.key_dim - mixer.value_dim
        return mixer.heads * num_queries * wider < math.prod(mixer.expansion)

    def absorb(self, q: Float[Array, "batch seq heads key_dim"]) -> Float[Array, "batch seq heads latent_dim"]:
        """Multiplies queries by the key half of kv_b_proj, so that they can be compared with latents directly."""
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        weight, _, change, *_ = self.kv_b_proj.matrix
        to_keys, _ = _by_head(self.config, weight.astype(q.dtype))
        absorbed = jnp.einsum("bshn,hnr->bshr", q_nope, to_keys)
        if change is not None:
            to_keys, _ = _by_head(self.config, change.b.astype(q.dtype))
            inner = own_columns(jnp.einsum("bshn,hnk->bshk", q_nope, to_keys), change)
            absorbed += inner @ change.a.astype(q.dtype)
        return jnp.concatenate([absorbed, q_rope], axis=-1)

    def values(self, mean: Float[Array, "batch seq heads latent_dim"]) -> Float[Array, "batch seq heads value_dim"]:
        """Applies the value half of kv_b_proj to attention-weighted means of latents."""
        weight, _, change, *_ = self.kv_b_proj.matrix
        _, to_values = _by_head(self.config, weight.astype(mean.dtype))
        latents = mean[..., : self.config.kv_lora_rank]
        values = jnp.einsum("bshr,hvr->bshv", latents, to_values)
        if change is not None:
            _, to_values = _by_head(self.config, change.b.astype(mean.dtype))
            inner = own_columns(latents @ change.a.astype(mean.dtype).T, change)
            values += jnp.einsum("bshk,hvk->bshv", inner, to_values)
        return values

    def _rotated(
        self, x: Float[Array, "batch seq heads rope_dim"], rope: RopeTables
    ) -> Float[Array, "batch seq heads rope_dim"]:
        return apply_rope(x, rope, interleaved=self.config.rope_interleave)


def _check_rows_of_heads(kv_b_proj: TicketedMatrix) -> None:
    """Refuses a matrix that cannot be split into rows of some heads."""
    for array, kind in ((kv_b_proj.change, "an adapter"), (kv_b_proj.in_fp8, "codes in FP8")):
        if jax.tree.leaves(array):
            raise ValueError(
                f"method 'ulysses' gives a device the rows of its heads in kv_b_proj, which has {kind}: use method 'ring' or "
                "'all_gather'"
            )


def expand(
    config: DeepseekV3Config, kv_b_proj: TicketedMatrix, latents: Float[Array, "batch seq latent_dim"]
) -> tuple[Float[Array, "batch seq heads key_dim"], Float[Array, "batch seq heads value_dim"]]:
    """Expands latents to the keys and values of every head, or of the heads whose rows of the matrix are given."""
    latent, k_rope = jnp.split(latents, [config.kv_lora_rank], axis=-1)
    by_head = linear_map(latent, kv_b_proj).reshape(*latent.shape[:-1], -1, config.qk_nope_head_dim + config.v_head_dim)
    k_nope, v = jnp.split(by_head, [config.qk_nope_head_dim], axis=-1)
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v


def _by_head(config: DeepseekV3Config, kv_b_proj: Float[Array, "out _"]) -> list[Array]:
    """Splits the matrix into its factors for keys [heads, qk_nope_head_dim, columns] and for values."""
    by_head = kv_b_proj.reshape(config.num_attention_heads, -1, kv_b_proj.shape[1])
    return jnp.split(by_head, [config.qk_nope_head_dim], axis=1)


def _as_one_head(_, latents: Float[Array, "batch seq latent_dim"]) -> tuple[Array, Array]:
    """Returns latents as the key and the value of one head. Values are not sliced out, which would copy them."""
    return latents[:, :, None], latents[:, :, None]
