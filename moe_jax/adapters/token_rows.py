"""Rows of new or chosen tokens that are trained alone, along with adapters (PEFT's `trainable_token_indices`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from moe_jax.layers.lora import TokenRows
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of, parameter_sharding

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of `Decoder.tables`."""


def trained_tables(model: Decoder) -> dict[str, Any]:
    """Returns the tables with rows that are trained alone."""
    return {name: table for name, table in model.tables.items() if table.token_rows is not None}


def check_tokens(tokens: Sequence[int], size: int, where: str) -> None:
    """Checks the ids of tokens whose rows are to be trained.

    Args:
      size: the number of tokens in the vocabulary.
      where: the setting, for the message.

    Raises:
      ValueError: an id is negative, or occurs twice, or ids between the vocabulary and a new token are missing.
    """
    if wrong := [token for token in tokens if isinstance(token, bool) or not isinstance(token, int) or token < 0]:
        raise ValueError(f"{where} must be ids of tokens, integers of at least 0; got {wrong[0]!r}")
    if twice := [token for token, number in Counter(tokens).items() if number > 1]:
        raise ValueError(f"{where} has the token {twice[0]} twice")
    new = sorted(token for token in tokens if token >= size)
    if new != list(range(size, size + len(new))):
        raise ValueError(
            f"{where} has the token {new[-1]}, which is not in the vocabulary of {size}; new tokens must be numbered from "
            f"{size} without a gap"
        )


def train_rows(model: Decoder, tokens: Mapping[str, Sequence[int]], rows: Mapping[str, np.ndarray] | None = None) -> None:
    """Makes rows of tables trainable, in place; tokens after the vocabulary's last extend it first.

    Args:
      tokens: {table: the tokens whose rows are trained}.
      rows: their initial values. Default: the tables' own rows.
    """
    size = 1 + max((token for ids in tokens.values() for token in ids), default=0)
    extend_vocabulary(model, max(size, model.config.vocab_size))
    mesh, tables = mesh_of(nnx.state(model)), model.tables
    for name, ids in tokens.items():
        weight = tables[name].weight[...]
        own = weight[np.array(ids)] if rows is None else jnp.asarray(rows[name])
        if mesh is not None:
            own = jax.device_put(own, parameter_sharding((name, "token_rows", "rows"), own.shape, mesh))
        tables[name].token_rows = TokenRows(tuple(ids), own)


def extend_vocabulary(
    model: Decoder, size: int, at_mean: Sequence[int] = (), rows: Mapping[str, np.ndarray] | None = None
) -> None:
    """Extends the vocabulary to `size` tokens, in place. New rows of each table are the mean of its rows.

    Args:
      at_mean: tokens inside the vocabulary whose rows become the mean too, such as rows that no token has used yet.
      rows: the new rows of a table in place of the mean.
    """
    before, mesh = model.config.vocab_size, mesh_of(nnx.state(model))
    old = tuple(token for token in at_mean if token < before)
    if size == before and not old:
        return
    for name, table in model.tables.items():
        weight = table.weight[...]
        out = parameter_sharding((name.rsplit(".", 1)[-1], "weight"), (size, weight.shape[1]), mesh)
        given = None if rows is None or name not in rows else jnp.asarray(rows[name])
        if mesh is not None:
            # The mean has the same bits on every mesh if no device sums a part of the rows.
            weight = jax.device_put(weight, NamedSharding(mesh, PartitionSpec()))
        extended = jax.jit(partial(_extended, size, old), out_shardings=None if mesh is None else out)(weight, given)
        # A quantised table is dequantised by reading it.
        table.weight = type(table.weight)(extended)
    model.config = replace(model.config, vocab_size=size)


def _extended(
    size: int, at_mean: tuple[int, ...], table: Float[Array, "vocab hidden"], rows: Float[Array, "new hidden"] | None
) -> Float[Array, "size hidden"]:
    mean = table.mean(0, dtype=jnp.promote_types(table.dtype, jnp.float32)).astype(table.dtype)
    if at_mean:
        table = table.at[jnp.array(at_mean)].set(mean)
    new = jnp.broadcast_to(mean, (size - len(table), len(mean))) if rows is None else rows.astype(table.dtype)
    return jnp.concatenate([table, new])
