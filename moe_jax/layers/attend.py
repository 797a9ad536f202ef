"""Attention of one layer's queries to the tokens they see: of this call, of all devices, or of a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.api import attention
from moe_jax.layers.cache import KVCache
from moe_jax.layers.segments import SequenceSplit

KV = tuple[Float[Array, "batch seq ..."], ...]
"""k and v, or the smaller arrays that an `Expand` makes them of."""

Expand = Callable[..., tuple[Array, Array]]
"""(k, v) = expand(weights, *kv), for each token alone. Its gradients are taken by `jax.vjp`."""


class Expansion(NamedTuple):
    """Makes keys and values of smaller arrays: (k, v) = expand(weights, *kv)."""

    expand: Expand
    """Closes over no array."""
    weights: Any
    """A pytree of arrays, the same on all devices of the axis."""


@dataclass(frozen=True)
class Attend:
    """softmax(scale * q k^T + mask) v for one layer; the model makes it, an attention module calls it.

    Attributes:
      segments: ids of these tokens' segments; with `context`, the first tokens of their segments.
      layer: the layer's index in the cache.
      window: the sliding window; None if there is none.
      cache: earlier tokens and room for these behind them; its `segment_ids` hold these tokens' segments already.
      context: how the sequences are split over devices; None if they are not.
    """

    segments: Int[Array, "batch seq"]
    layer: Int[Array, ""]
    window: Int[Array, ""] | None = None
    cache: KVCache | None = None
    context: SequenceSplit | None = None

    @property
    def sees_cached_tokens(self) -> bool:
        """True if a cache holds earlier tokens for these to see."""
        return self.cache is not None and not self.cache.is_empty

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
          kept: k and v, or the arrays that `expansion` makes them from. A cache holds `kept`, and devices send it to each
            other.
          expansion: makes k and v of `kept`, for any tokens.
        """
        if self.context is not None:
            out = self.context.attention(q, kept, self.segments, scale=scale, expansion=expansion, window=self.window)
            return out, None
        cache, keys = self.cache, self.segments
        offset: Array | int = 0
        if cache is not None:
            cache = cache.write(self.layer, kept)
            # A prompt in an empty cache sees its own tokens only. Not reading the cache lets it use the fused kernel, which
            # takes equally many queries and keys.
            if self.sees_cached_tokens:
                kept, keys, offset = cache.read(self.layer, q.dtype), cache.segment_ids, cache.length
        expand, weights = (None, ()) if expansion is None else expansion
        k, v = keys_and_values(expand, weights, kept)
        out = attention(
            q,
            k,
            v,
            scale=scale,
            query_segment_ids=self.segments,
            key_segment_ids=keys,
            query_offset=offset,
            window=self.window,
        )
        return out, cache


def keys_and_values(expand: Expand | None, weights, kv: KV) -> tuple[Array, Array]:
    """Returns (k, v) = expand(weights, *kv); without `expand`, `kv` are keys and values already."""
    k, v = kv if expand is None else expand(weights, *kv)
    return k, v
