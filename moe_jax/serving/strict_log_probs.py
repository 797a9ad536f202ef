"""Log-probabilities of whole sequences with the bits that an engine with `strict=True` gives them, and with gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.kernels.token_log_probs import token_log_probs
from moe_jax.layers.paged import PagedAttend, empty_pages
from moe_jax.layers.segments import has_successor
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import check_shapes
from moe_jax.parallel.spread import ONE_DEVICE, Spread
from moe_jax.serving.packed_rows import PackedRows, in_pages
from moe_jax.serving.prompts import PIECE_TOKENS, piece_scores
from moe_jax.serving.strict import check_strict, strict_layers
from moe_jax.serving.weights import frame_of, head_of, layers_of, take_apart


def strict_log_probs(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    segment_ids: Integer[Array, "rows seq"] | None = None,
    *,
    max_segments: int = 2,
) -> Float[Array, "rows seq-1"]:
    """Returns log p(tokens[:, i + 1]) behind the tokens up to i, bit for bit what `Engine(model, strict=True)` returns.

    The values have strict bits. The gradients are those of the ordinary forward pass of training, with the experts that the
    strict pass chose. So they cost the usual forward and backward pass beside the strict one. Under `jax.jit`, values alone
    cost the strict pass alone.

    The result is 0 where the next token is padding or of another document.

    Args:
      segment_ids: 0 is padding, and each run of other equal ids is a document, as in training. A document has the bits that it
        has in a row of its own. Positions follow from the segments. None: each row is one sequence.
      max_segments: the most runs of equal ids in a row, padding included. 2 is a sequence and its padding. It sets the number
        of pages. A row with more runs gives NaN under `jax.jit`.

    Raises:
      ValueError: a model that `strict.check_strict` refuses or that is spread over devices. Shapes that do not fit each other,
        or, where the ids are known, more segments than `max_segments`.
    """
    check_strict(model)
    if model.execution.spread not in (ONE_DEVICE, Spread()):
        raise ValueError("strict_log_probs computes on one device; on several, use train.log_probs")
    check_shapes(model.config, tokens, None, segment_ids, None, None)
    if segment_ids is None:
        segment_ids, max_segments = jnp.ones_like(tokens), 1
    packed = in_pages(segment_ids, max_segments)
    fits = packed.num_segments <= max_segments
    if not isinstance(fits, jax.core.Tracer) and not fits.all():
        raise ValueError(
            f"max_segments must be at least the runs of equal segment_ids in a row, padding included; "
            f"got {max_segments} for a row with {packed.num_segments.max()}"
        )
    graphdef, state = nnx.split(model)
    fixed = nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, state))
    strict = _strict_pass(fixed, tokens, segment_ids != 0, packed)
    found = _with_gradients_of(_training_pass(model, tokens, segment_ids, strict.experts), strict.log_probs)
    return jnp.where(fits[:, None], jnp.where(has_successor(segment_ids, 1)[:, :-1], found, 0), jnp.nan)


@jax.custom_vjp
def _with_gradients_of(source: Float[Array, "rows seq"], values: Float[Array, "rows seq"]) -> Float[Array, "rows seq"]:
    """Returns `values`; derivatives go to `source`. The sum `source` + (`values` - `source`) would have other bits."""
    return values


_with_gradients_of.defvjp(lambda _, values: (values, None), lambda _, d_values: (d_values, jnp.zeros_like(d_values)))


def _training_pass(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    segment_ids: Integer[Array, "rows seq"],
    experts: Int[Array, "moe_layers rows seq k"] | None,
) -> Float[Array, "rows seq-1"]:
    """Returns what `train.log_probs` returns, with these experts."""
    hidden = model.hidden_states(tokens, segment_ids=segment_ids, expert_ids=experts).hidden[:, :-1]
    labels = tokens[:, 1:]
    return token_log_probs(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.ravel()).reshape(labels.shape)


class _StrictPass(NamedTuple):
    log_probs: Float[Array, "rows seq-1"]
    experts: Int[Array, "moe_layers rows seq k"] | None
    """None: no layer has experts."""


def _strict_pass(
    model: Decoder, tokens: Int[Array, "rows seq"], valid: Bool[Array, "rows seq"], packed: PackedRows
) -> _StrictPass:
    served, weights = take_apart(model)
    (rows, seq), config = tokens.shape, served.config
    attends = [
        PagedAttend(pages, packed.places, packed.queries, window=window)
        for pages, window in zip(empty_pages(config, packed.num_pages, served.dtype), config.layer_windows, strict=True)
    ]
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](tokens.reshape(1, -1), served.dtype)
    layers = layers_of(served, weights)
    computed = strict_layers(served, layers, frame["norm"], x[0], packed.positions, attends, valid.ravel())
    hidden = computed.hidden.reshape(rows, seq, -1)[:, :-1].reshape(rows * (seq - 1), -1)
    log_probs = _of_tokens(hidden, head_of(frame), tokens[:, 1:].ravel()).reshape(rows, seq - 1)
    if not computed.experts:
        return _StrictPass(log_probs, None)
    experts = jnp.stack(computed.experts).reshape(-1, rows, seq, computed.experts[0].shape[1])
    # Padding chose no expert: its ids are behind the last expert.
    return _StrictPass(log_probs, jnp.where(valid[..., None], experts, jnp.arange(experts.shape[3], dtype=experts.dtype)))


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
