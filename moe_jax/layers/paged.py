"""Attention of decoding sequences with keys and values in pages: a layer writes new tokens, then reads all of a row's.

A page holds PAGE_SIZE tokens of one sequence in one layer, at any place in the pool. `kernels.attention.paged` reads them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention
from moe_jax.kernels.attention.paged.fp8 import Pages, empty, written
from moe_jax.layers.attend import KV, Expansion

LayerPages = tuple[Pages, ...]
"""One layer's pages: keys and values, or the latents for both, as one head."""


class TokenPlaces(NamedTuple):
    """The page and offset where each token of a step is written."""

    page: Int[Array, "tokens"]
    offset: Int[Array, "tokens"]
    """The token's place inside the page."""


def empty_pages(config: ModelConfig, num_pages: int, dtype: DTypeLike, *, in_fp8: bool = False) -> list[LayerPages]:
    """Creates the pages of all layers, as zeros: unwritten rows must be finite, because they are multiplied by zeros."""
    # A layer keeps one array of heads for each of keys and values, or one of latents without heads.
    shapes = [shape if len(shape) == 2 else (1, *shape) for shape in config.cache_shapes]
    layers = range(config.num_hidden_layers)
    sizes = [(num_pages, heads, PAGE_SIZE, width) for heads, width in shapes]
    return [tuple(empty(size, dtype, in_fp8=in_fp8) for size in sizes) for _ in layers]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttend:
    """softmax(scale * q k^T + mask) v for one layer with keys in pages; replaces `Attend`.

    Attributes:
      pages: the layer's pages, with room for the tokens of this call.
      places: where the call's tokens are written.
      queries: the rows' queries and pages.
      single_query_rows: as in `paged_attention`.
      value_dim: the width of values that are the first columns of latents; None if pages hold values.
      window: the sliding window; None if there is none.
      sinks, fixed_splits: as in `paged_attention`. An attention module with sinks sets them.
    """

    pages: LayerPages
    places: TokenPlaces
    queries: PagedQueries
    single_query_rows: int = field(metadata={"static": True}, default=0)
    value_dim: int | None = field(metadata={"static": True}, default=None)
    window: Int[Array, ""] | int | None = None
    sinks: Float[Array, " heads"] | None = None
    fixed_splits: bool = field(metadata={"static": True}, default=False)

    def __call__(
        self,
        q: Float[Array, "1 tokens heads key_dim"],
        kept: KV,
        expansion: Expansion | None = None,
        *,
        scale: float,
    ) -> tuple[Float[Array, "1 tokens heads value_dim"], LayerPages]:
        """Returns the result, and the pages with these tokens in them.

        Args:
          kept: k and v, or the latents, of this call's tokens, which are written before queries read.
          expansion: ignored. Queries of latents are already absorbed (`LatentAttention.absorb`); their result is a mean of
            latents.
        """
        page, offset = self.places
        heads = (tokens[0] if tokens.ndim == 4 else tokens[0][:, None] for tokens in kept)
        pages = tuple(written(pages, page, offset, tokens) for pages, tokens in zip(self.pages, heads, strict=True))
        return self.read(q[0], pages, scale=scale)[None], pages

    def read(
        self, q: Float[Array, "tokens heads key_dim"], written: LayerPages, *, scale: float
    ) -> Float[Array, "tokens heads value_dim"]:
        """Returns attention over the pages, which already include this call's keys and values."""
        return paged_attention(
            q,
            written[0],
            None if len(written) == 1 else written[1],
            self.queries,
            scale=scale,
            window=self.window,
            sinks=self.sinks,
            single_query_rows=self.single_query_rows,
            value_dim=self.value_dim,
            fixed_splits=self.fixed_splits,
        )
