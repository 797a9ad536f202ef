"""Which tokens the queries of a layer see: those of this call, those of all devices, or those of a cache."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.api import attention
from moe_jax.layers.cache import KVCache
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.parallel.sequence.ring import KV, Expand, keys_and_values


@dataclass(frozen=True)
class Attend:
    """softmax(scale * q k^T + mask) v for one layer; the model makes it, an attention module calls it.

    Attributes:
      segments: ids of these tokens' segments; with `context_parallel` the first tokens of their segments.
      layer: the layer's index in the cache.
      window: the sliding window, if there is one.
      cache: room for these tokens behind earlier ones, if there are any; its segments have these tokens' already.
      context_parallel: how the sequences are split over devices, if they are.
    """

    segments: Int[Array, "batch seq"]
    layer: Int[Array, ""]
    window: Int[Array, ""] | None = None
    cache: KVCache | None = None
    context_parallel: ContextParallel | None = None

    @property
    def sees_cached_tokens(self) -> bool:
        """Whether there are earlier tokens to see, in a cache, beside those of this call."""
        return self.cache is not None and not self.cache.is_empty

    def __call__(
        self,
        q: Float[Array, "batch seq heads key_dim"],
        kept: KV,
        expand: Expand | None = None,
        weights=(),
        *,
        scale: float,
    ) -> tuple[Float[Array, "batch seq heads value_dim"], KVCache | None]:
        """Returns the result and the cache with these tokens in it.

        Args:
          kept: k and v, or what `expand` makes them of: what a cache holds and what travels between devices.
          expand: (k, v) = expand(weights, *kept), of any tokens.
          weights: the parameters that `expand` reads.
        """
        if self.context_parallel is not None:
            options = dict(expand=expand, weights=weights, window=self.window)
            return self.context_parallel.attention(q, kept, self.segments, scale=scale, **options), None
        cache, keys = self.cache, self.segments
        offset: Array | int = 0
        if cache is not None:
            cache = cache.write(self.layer, kept)
            # A prompt's own tokens are all that it sees, and as queries and keys alike they fit the fused kernel.
            if self.sees_cached_tokens:
                kept, keys, offset = cache.read(self.layer, q.dtype), cache.segment_ids, cache.length
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
