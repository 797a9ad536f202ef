"""Log-probabilities of whole sequences with the bits that an engine with `strict=True` gives them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import PagedAttend, TokenPlaces, empty_pages
from moe_jax.models.decoder import Decoder
from moe_jax.serving.prompts import PIECE_TOKENS, piece_scores
from moe_jax.serving.strict import check_strict, strict_layers
from moe_jax.serving.weights import frame_of, head_of, layers_of, take_apart


def strict_log_probs(
    model: Decoder, tokens: Int[Array, "rows seq"], valid: Bool[Array, "rows seq"] | None = None
) -> Float[Array, "rows seq-1"]:
    """Returns log p(tokens[:, i + 1] | tokens[:, : i + 1]), bit for bit what `Engine(model, strict=True)` returns.

    May be jitted. A forward pass alone: it has no gradients yet. A row is one sequence; rows of packed documents are not taken.

    Args:
      valid: False behind the end of a row; results there are of no use. None: all tokens count.

    Raises:
      ValueError: a model that `strict.check_strict` refuses.
    """
    check_strict(model)
    served, weights = take_apart(model)
    (rows, seq), config = tokens.shape, served.config
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), tokens.shape)
    per_row = -(-seq // PAGE_SIZE)
    table = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
    queries = PagedQueries(seq * jnp.arange(rows + 1, dtype=jnp.int32), jnp.full(rows, seq, jnp.int32), table)
    places = TokenPlaces(table[:, positions[0] // PAGE_SIZE].ravel(), (positions % PAGE_SIZE).ravel())
    attends = [
        PagedAttend(pages, places, queries, window=window)
        for pages, window in zip(empty_pages(config, rows * per_row, served.dtype), config.layer_windows, strict=True)
    ]
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](tokens.reshape(1, -1), served.dtype)
    layers = layers_of(served, weights)
    hidden = strict_layers(served, layers, frame["norm"], x[0], positions.ravel(), attends, valid.ravel()).hidden
    hidden = hidden.reshape(rows, seq, -1)[:, :-1].reshape(rows * (seq - 1), -1)
    return _of_tokens(hidden, head_of(frame), tokens[:, 1:].ravel()).reshape(rows, seq - 1)


def _of_tokens(
    hidden: Float[Array, "tokens hidden"], head: Float[Array, "vocab hidden"], targets: Int[Array, "tokens"]
) -> Float[Array, "tokens"]:
    def of_piece(piece):
        hidden, targets = piece
        return piece_scores(hidden, head, targets, 0, strict=True).logprobs

    pieces = -(-len(hidden) // PIECE_TOKENS)
    padding = pieces * PIECE_TOKENS - len(hidden)
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(pieces, PIECE_TOKENS, -1)
    found = jax.lax.map(of_piece, (hidden, jnp.pad(targets, (0, padding)).reshape(pieces, -1)))
    return found.ravel()[: pieces * PIECE_TOKENS - padding]
