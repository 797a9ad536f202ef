"""Log-probabilities of whole sequences, bit for bit equal to an engine with `strict=True`, and differentiable."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.kernels.vocabulary import token_log_probs
from moe_jax.layers.paged import PagedAttend, TokenPlaces, empty_pages
from moe_jax.layers.segments import has_successor, segment_positions
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import check_shapes
from moe_jax.parallel.spread import ONE_DEVICE, Spread
from moe_jax.serving.fused import check_strict, strict_layers
from moe_jax.serving.prompts import PIECE_TOKENS, piece_scores
from moe_jax.serving.request import KvDtype
from moe_jax.serving.weights import frame_of, head_of, layers_of, take_apart


class PackedRows(NamedTuple):
    """The places, positions and queries of the tokens of packed rows, concatenated."""

    positions: Int[Array, "tokens"]
    """Each token's index in its segment."""
    places: TokenPlaces
    queries: PagedQueries
    """A row for each segment; rows after the last segment of a row of tokens have no queries."""
    num_pages: int
    num_segments: Int[Array, "rows"]
    """The number of segments of each row of tokens. If it exceeds `max_segments`, the row's other fields are meaningless."""


def in_pages(segment_ids: Integer[Array, "rows seq"], max_segments: int) -> PackedRows:
    """Assigns each segment, a run of equal ids, its own pages. Padding is a segment too.

        row         | a: 100 tokens | b: 70 tokens | padding: 22 tokens |
        pages       |   0   |   1   |   2   |  3   |         4          |

    Args:
      max_segments: maximum number of segments of a row.
    """
    rows, seq = segment_ids.shape
    positions = segment_positions(segment_ids)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    number = jnp.cumsum(positions == 0, axis=1, dtype=jnp.int32) - 1
    # The sum of ceil(length / 64) is largest if each segment leaves 63 places of its last page empty.
    per_row = (seq + (PAGE_SIZE - 1) * max_segments) // PAGE_SIZE
    page = jnp.cumsum(positions % PAGE_SIZE == 0, axis=1, dtype=jnp.int32) - 1
    page = (per_row * row + jnp.minimum(page, per_row - 1)).ravel()
    segment = (max_segments * row + jnp.minimum(number, max_segments - 1)).ravel()
    lengths = jnp.zeros(rows * max_segments, jnp.int32).at[segment].add(1)
    num_pages = rows * per_row
    first_page = jnp.full(rows * max_segments, num_pages, jnp.int32).at[segment].min(page)
    table = jnp.minimum(first_page[:, None] + jnp.arange(-(-seq // PAGE_SIZE), dtype=jnp.int32), num_pages - 1)
    queries = PagedQueries(jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0)), lengths, table)
    places = TokenPlaces(page, (positions % PAGE_SIZE).ravel())
    return PackedRows(positions.ravel(), places, queries, num_pages, number[:, -1] + 1)


def strict_log_probs(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    segment_ids: Integer[Array, "rows seq"] | None = None,
    *,
    max_segments: int = 2,
    temperature: float = 1.0,
    kv_dtype: KvDtype = "model",
) -> Float[Array, "rows seq-1"]:
    """Returns log p(tokens[:, i + 1]) given the tokens up to i, bit for bit equal to `Engine(model, strict=True)`.

    The values have strict bits. The gradients come from training's ordinary forward pass, with the experts that the strict pass
    chose. So they cost the usual forward and backward pass plus the strict one. Under `jax.jit`, values without gradients cost
    only the strict pass.

    The result is 0 where the next token is padding or of another document.

    Args:
      segment_ids: 0 is padding, and each run of other equal ids is a document, as in training. A document has the same bits as
        in its own row. Positions follow from the segments. None: each row is one sequence.
      max_segments: maximum number of runs of equal ids in a row, including padding. 2 is a sequence and its padding. It sets
        the number of pages. A row with more runs yields NaN under `jax.jit`.
      temperature: divides the logits, as in an engine after `temper_logprobs`.
      kv_dtype: the engine's (`EngineLimits`). With "fp8" gradients are those without the rounding of keys and values.

    Raises:
      ValueError: a model that `fused.check_strict` refuses or that is spread over devices. Shapes that do not match, or, if the
        ids are known, more segments than `max_segments`. Also an unknown `kv_dtype`.
    """
    check_strict(model)
    if kv_dtype not in get_args(KvDtype):
        raise ValueError(f'kv_dtype must be "model" or "fp8"; got {kv_dtype!r}')
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
    log_probs, experts = _of_packed(fixed, tokens, segment_ids != 0, packed, temperature, kv_dtype)
    found = with_gradients_of(_training_pass(model, tokens, segment_ids, experts, temperature), log_probs)
    return jnp.where(fits[:, None], jnp.where(has_successor(segment_ids, 1)[:, :-1], found, 0), jnp.nan)


def strict_pass(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    segment_ids: Integer[Array, "rows seq"],
    *,
    max_segments: int,
    temperature: float = 1.0,
    kv_dtype: KvDtype = "model",
) -> tuple[Float[Array, "rows seq-1"], Int[Array, "moe_layers rows seq k"] | None]:
    """Returns the values of `strict_log_probs`, which has the arguments, and the experts; None if no layer has any.

    Under `jax.jit`, values of a row with more than `max_segments` segments are meaningless. So are values of tokens without a
    successor in their document.
    """
    return _of_packed(model, tokens, segment_ids != 0, in_pages(segment_ids, max_segments), temperature, kv_dtype)


@jax.custom_vjp
def with_gradients_of(source: Float[Array, "rows seq"], values: Float[Array, "rows seq"]) -> Float[Array, "rows seq"]:
    """Returns `values`; gradients flow to `source`. The sum `source` + (`values` - `source`) would have other bits."""
    return values


with_gradients_of.defvjp(lambda _, values: (values, None), lambda _, d_values: (d_values, jnp.zeros_like(d_values)))


def _training_pass(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    segment_ids: Integer[Array, "rows seq"],
    experts: Int[Array, "moe_layers rows seq k"] | None,
    temperature: float,
) -> Float[Array, "rows seq-1"]:
    """Computes `train.log_probs` with these experts, of logits / temperature."""
    hidden = model.hidden_states(tokens, segment_ids=segment_ids, expert_ids=experts).hidden[:, :-1]
    hidden = hidden if temperature == 1 else hidden / temperature
    labels = tokens[:, 1:]
    return token_log_probs(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.ravel()).reshape(labels.shape)


def _of_packed(
    model: Decoder,
    tokens: Int[Array, "rows seq"],
    valid: Bool[Array, "rows seq"],
    packed: PackedRows,
    temperature: float,
    kv_dtype: KvDtype,
) -> tuple[Float[Array, "rows seq-1"], Int[Array, "moe_layers rows seq k"] | None]:
    """Returns the log-probabilities, and the experts, None if no layer has any."""
    served, weights = take_apart(model)
    (rows, seq), config = tokens.shape, served.config
    empty = empty_pages(config, packed.num_pages, served.dtype, in_fp8=kv_dtype == "fp8")
    attends = [
        PagedAttend(pages, packed.places, packed.queries, window=window)
        for pages, window in zip(empty, config.layer_windows, strict=True)
    ]
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](tokens.reshape(1, -1), served.dtype)
    layers = layers_of(served, weights)
    hidden, _, chosen = strict_layers(served, layers, frame["norm"], x[0], packed.positions, attends, valid.ravel())
    hidden = hidden.reshape(rows, seq, -1)[:, :-1].reshape(rows * (seq - 1), -1)
    log_probs = _of_tokens(hidden, head_of(frame), tokens[:, 1:].ravel(), temperature).reshape(rows, seq - 1)
    if not chosen:
        return log_probs, None
    experts = jnp.stack(chosen).reshape(-1, rows, seq, chosen[0].shape[1])
    # Padding has no expert: its ids are past the last expert.
    return log_probs, jnp.where(valid[..., None], experts, jnp.arange(experts.shape[3], dtype=experts.dtype))


def _of_tokens(
    hidden: Float[Array, "tokens hidden"], head: Float[Array, "vocab hidden"], targets: Int[Array, "tokens"], temperature: float
) -> Float[Array, "tokens"]:
    def of_piece(piece):
        hidden, targets = piece
        return piece_scores(hidden, head, targets, 0, strict=True, temperature=temperature)[0]

    pieces = -(-len(hidden) // PIECE_TOKENS)
    padding = pieces * PIECE_TOKENS - len(hidden)
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(pieces, PIECE_TOKENS, -1)
    found = jax.lax.map(of_piece, (hidden, jnp.pad(targets, (0, padding)).reshape(pieces, -1)))
    return found.ravel()[: pieces * PIECE_TOKENS - padding]
