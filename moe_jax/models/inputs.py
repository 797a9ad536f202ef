"""Checks a model's arguments, so that a mistake is reported before anything is computed."""

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

MAX_CHECKED_TOKENS = 1 << 16
"""Largest number of ids on an accelerator that are checked: copying them to the host waits for the device."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}
"""Other libraries' names of the dtypes."""


def token_ids(tokens: Any, vocab_size: int, name: str = "tokens") -> Integer[Array, "batch seq"]:
    """Validates token ids and returns them as an array [batch, seq].

    Raises:
      ValueError: the ids are text, floats, or of another shape. Also ids outside the vocabulary, if their values are known
        (not under `jax.jit`) and copied cheaply (on the host, or at most MAX_CHECKED_TOKENS).
    """
    tokens = integers(tokens, name)
    if tokens.ndim != 2:
        raise ValueError(f"{name} must be [batch, seq]; got shape {tokens.shape}")
    if _is_cheap_to_read(tokens):
        ids = np.asarray(tokens)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"{name} must be ids from 0 to {vocab_size - 1}, the model's vocabulary; got {outside[0]}. Padding takes any "
                "id of the vocabulary, and segment_ids of 0"
            )
    return jnp.asarray(tokens)


def refuse_deleted(arrays: Any) -> None:
    """Raises if an array of the model was deleted, typically because a jitted step donated it.

    Raises:
      ValueError: an array was deleted.
    """
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    if any(leaf.is_deleted() for leaf in leaves):
        raise ValueError(
            "model has arrays that were deleted, by a training step that donated them or by Engine(..., take_over=True): "
            "give the trained model, which nnx.merge makes of the new state, or load it again"
        )


def integers(values: Any, name: str) -> Any:
    """Returns the values as an integer array; booleans (such as masks) become 0 and 1.

    Raises:
      ValueError: the values are no integers, or rows have different lengths.
    """
    if not isinstance(values, jax.Array | np.ndarray):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(
                f"{name} must be [batch, seq]; the rows have different lengths: pad them, and pass segment_ids of 0 for padding"
            ) from error
    if values.dtype == bool:
        return values.astype(np.int32)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        text = (
            "; a tokenizer makes ids of text, moe_jax.complete(model, text) continues it" if values.dtype.kind in "UO" else ""
        )
        raise ValueError(f"{name} must be an array of integers [batch, seq]; got dtype {values.dtype}{text}")
    return values


def check_shapes(config, tokens, positions, segment_ids, cache, expert_ids) -> None:
    """Checks that the shapes of a call's arguments match `tokens`, [batch, seq].

    Raises:
      ValueError: shapes do not match, or a cache comes without positions or has no room.
    """
    if 0 in tokens.shape:
        raise ValueError(f"tokens must hold at least one token; got shape {tokens.shape}")
    for name, array in (("positions", positions), ("segment_ids", segment_ids)):
        if array is not None and array.shape != tokens.shape:
            raise ValueError(f"{name} must have tokens' shape {tokens.shape}; got {array.shape}")
    if cache is not None and (len(cache.segment_ids) != len(tokens) or cache.segment_ids.shape[1] < tokens.shape[1]):
        raise ValueError(f"the cache has room for (sequences, tokens) = {cache.segment_ids.shape}; got tokens {tokens.shape}")
    if cache is not None and not isinstance(cache.length, jax.core.Tracer):
        length, room = int(cache.length), cache.segment_ids.shape[1]
        if length + tokens.shape[1] > room:
            raise ValueError(f"the cache has room for {room} tokens and holds {length}; got {tokens.shape[1]} more")
    if cache is not None and positions is None:
        raise ValueError("positions must be given with a cache: the index in the segment continues from the cached tokens")
    if expert_ids is not None:
        wanted = (len(config.moe_layers), *tokens.shape, config.experts.num_experts_per_tok if config.experts else 0)
        if expert_ids.shape != wanted:
            raise ValueError(f"expert_ids must be [moe_layers, batch, seq, k] = {wanted}; got {expert_ids.shape}")


def float_dtype(dtype: Any, name: str = "dtype") -> jnp.dtype:
    """Returns `dtype` as a floating-point dtype, from a dtype object or its name.

    Raises:
      ValueError: `dtype` names no dtype, or no floating-point dtype.
    """
    try:
        # numpy would take None as float64.
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        # torch.float32 is written "torch.float32".
        short = str(dtype).rpartition(".")[2].lower()
        near = OTHER_NAMES.get(short) or next(iter(difflib.get_close_matches(short, DTYPES, 1)), None)
        advice = f"; {near}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}; got {dtype!r}{advice}")
    return found


def _is_cheap_to_read(tokens: Any) -> bool:
    if isinstance(tokens, jax.core.Tracer):
        return False
    if isinstance(tokens, np.ndarray):
        return True
    return tokens.is_fully_addressable and (
        tokens.size <= MAX_CHECKED_TOKENS or all(device.platform == "cpu" for device in tokens.devices())
    )
