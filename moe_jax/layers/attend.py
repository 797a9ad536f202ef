"""Attention of one layer's queries to tokens of this call, of all devices, or of a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.attention.api import attention
from moe_jax.kernels.attention.online_softmax import PartialAttention
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.cache import KVCache
from moe_jax.layers.segments import SequenceSplit

KV = tuple[Float[Array, "batch seq ..."], ...]
"""k and v, or the smaller arrays from which an `Expand` computes them."""

Expand = Callable[..., tuple[Array, Array]]
"""(k, v) = expand(weights, *kv), for each token separately. `jax.vjp` differentiates it."""


class Expansion(NamedTuple):
    """A function that computes keys and values from smaller arrays, such as MLA latents: (k, v) = expand(weights, *kv)."""

    expand: Expand
    """A function that closes over no array."""
    weights: Any
    """A pytree of arrays, the same on all devices of the axis."""


@dataclass(frozen=True)
class Attend:
    """softmax(scale * q k^T + mask) v for one layer; the model creates it, and an attention module calls it.

    Attributes:
      segments: ids of these tokens' segments; with `context`, the first tokens of their segments.
      layer: the layer's index in the cache.
      window: the sliding window; None if there is none.
      cache: earlier tokens, with room for these after them; its `segment_ids` already hold these tokens' segments.
      context: how the sequences are split over devices; None if they are not.
      sinks: each head's extra score in the softmax, which belongs to no token; not with `context`. An attention module with
        sinks sets them.
      is_kept: an enclosing `jax.checkpoint` keeps the result (`models.remat`).
    """

    segments: Int[Array, "batch seq"]
    layer: Int[Array, ""]
    window: Int[Array, ""] | None = None
    cache: KVCache | None = None
    context: SequenceSplit | None = None
    sinks: Float[Array, " heads"] | None = None
    is_kept: bool = False

    @property
    def sees_cached_tokens(self) -> bool:
        """True if the queries also attend to tokens in the KV cache."""
        return self.cache is not None and not self.cache.is_empty

    def follows(self) -> Bool[Array, "batch seq"]:
        """Returns True for each token that continues a recurrent layer's state: the previous token has the same segment.

        The first token follows the cache's last one. False for padding.
        """
        before = jnp.zeros_like(self.segments[:, :1])
        if self.cache is not None and not self.cache.is_empty:
            before = lax.dynamic_slice_in_dim(self.cache.segment_ids, self.cache.length - 1, 1, axis=1)
        before = jnp.concatenate([before, self.segments[:, :-1]], axis=1)
        return (self.segments == before) & (self.segments != 0)

    def states(self, like: tuple[Float[Array, "batch ..."], ...]) -> tuple[Float[Array, "batch ..."], ...]:
        """Returns a recurrent layer's initial states in the dtypes of `like`; `like` itself without cached tokens.

        Inside `jax.shard_map` they vary over devices like the tokens.
        """
        if not self.sees_cached_tokens:
            return vary_as(like, self.segments)
        assert self.cache is not None
        return tuple(a.astype(b.dtype) for a, b in zip(self.cache.read_states(self.layer), like, strict=True))

    def keep(self, states: tuple[Float[Array, "batch ..."], ...]) -> KVCache | None:
        """Returns the cache updated with a recurrent layer's final states; None without a cache."""
        return None if self.cache is None else self.cache.write_states(self.layer, states)

    def __call__(
        self,
        q: Float[Array, "batch seq heads key_dim"],
        kept: KV,
        expansion: Expansion | None = None,
        *,
        scale: float,
    ) -> tuple[Float[Array, "batch seq heads value_dim"], KVCache | None]:
        """Returns the result, and the cache with these tokens in it (None without a cache).

        Args:
          kept: k and v, or the arrays that `expansion` expands. A cache holds `kept`, and devices exchange it.
          expansion: computes k and v from `kept`, for any tokens.
        """
        if self.context is not None:
            assert self.sinks is None  # refused by `models.forward.layer_inputs`
            out = self.context.attention(q, kept, self.segments, scale=scale, expansion=expansion, window=self.window)
            return (_apart(out) if self.is_kept else out), None
        cache, keys = self.cache, self.segments
        offset: Array | int = 0
        if cache is not None:
            cache = cache.write(self.layer, kept)
            # A prompt in an empty cache sees its own tokens only. Without reading the cache it can use the fused kernel, which
            # needs equal numbers of queries and keys.
            if self.sees_cached_tokens:
                kept, keys, offset = cache.read(self.layer, q.dtype), cache.segment_ids, cache.length
        expand, weights = (None, ()) if expansion is None else expansion
        k, v = keys_and_values(expand, weights, kept)
        found = attention(
            q,
            k,
            v,
            scale=scale,
            query_segment_ids=self.segments,
            key_segment_ids=keys,
            query_offset=offset,
            window=self.window,
            return_lse=self.sinks is not None,
        )
        if not isinstance(found, PartialAttention):
            return (_apart(found) if self.is_kept else found), cache
        assert self.sinks is not None
        return with_sinks(*found, self.sinks), cache


def with_sinks(
    out: Float[Array, "batch seq heads value_dim"], lse: Float[Array, "batch heads seq"], sinks: Float[Array, " heads"]
) -> Float[Array, "batch seq heads value_dim"]:
    """Applies attention sinks, extra softmax scores without a value: out * sigmoid(lse - sinks), in f32.

    With z = exp(lse), the sum over the seen keys becomes z + exp(sink), so their weights shrink by z / (z + exp(sink)).
    (gpt-oss, https://arxiv.org/abs/2508.10925.)
    """
    seen = jax.nn.sigmoid(lse - sinks.astype(lse.dtype)[:, None]).swapaxes(1, 2)[..., None]
    return (out * seen).astype(out.dtype)


def keys_and_values(expand: Expand | None, weights, kv: KV) -> tuple[Array, Array]:
    """Returns (k, v) = expand(weights, *kv); without `expand`, `kv` are already keys and values."""
    k, v = kv if expand is None else expand(weights, *kv)
    return k, v


def _apart(out: Array) -> Array:
    """Returns a kept result as another array of the traced program.

    `jax.checkpoint` keeps it for attention's backward pass. The output's map would keep the same array once more.
    """
    finfo = jnp.finfo(out.dtype)
    return lax.reduce_precision(out, finfo.nexp, finfo.nmant)
