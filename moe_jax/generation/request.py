"""A request to a model: prompts and options, all checked before anything is computed."""

import logging
import math
import os
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moe_jax.checkpoint.companions import generation_config
from moe_jax.config import ModelConfig
from moe_jax.generation.prompts import as_prompts
from moe_jax.models.decoder import Decoder

_logger = logging.getLogger(__name__)

_warned_of: set[int] = set()
"""Maximum lengths for which this process has already warned; each is logged once."""


class DecodeOptions(NamedTuple):
    """The static options of a decoding loop; a program is compiled for each set of values."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]
    """Token ids, any of which ends a sequence; empty: none does."""
    overlap_prefill: bool = False
    """Two halves of a device's prompts pass the layers in one loop (`generation.prefill`)."""


class Request(NamedTuple):
    """Checked prompts, as lists of ints, and options."""

    prompts: list[list[int]]
    single: bool
    """True if one flat prompt was given."""
    options: DecodeOptions


class Padding(NamedTuple):
    """The padding of prompts: the user's attention mask, and the tokens that tokenizers pad with (`padding_ids`)."""

    attention_mask: Any = None
    token_ids: Collection[int] = ()


def checked_request(
    config: ModelConfig,
    prompt_tokens,
    padding: Padding | None = None,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | Sequence[int] | None,
) -> Request:
    """Checks prompts and options, and warns once if a sequence may exceed the length that the model was trained for.

    Other arguments as in `generate`.

    Raises:
      ValueError: `as_prompts` refuses the prompts; or options are outside their ranges, all listed in one error. Or the cache
        would not fit a device's memory, whatever the dtype.
    """
    mask, pad_tokens = padding or Padding()
    prompts, single = as_prompts(prompt_tokens, config.vocab_size, mask, pad_tokens)
    ends = tuple(int(end) for end in np.atleast_1d([] if eos_token_id is None else eos_token_id))
    problems = []
    if not (isinstance(temperature, Real) and temperature >= 0):
        problems.append(f"temperature must be a number, 0 or more; got {temperature!r}")
    if top_k is not None and not (isinstance(top_k, Integral) and top_k >= 1):
        problems.append(f"top_k must be an integer, at least 1; got {top_k!r}")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        problems.append(f"top_p must be a number in (0, 1]; got {top_p!r}")
    if not (isinstance(max_new_tokens, Integral) and max_new_tokens >= 1):
        problems.append(f"max_new_tokens must be an integer, at least 1; got {max_new_tokens!r}")
    outside = [end for end in ends if not 0 <= end < config.vocab_size]
    problems += [f"eos_token_id {end} is outside the vocabulary of {config.vocab_size}" for end in outside]
    if problems:
        raise ValueError("; ".join(problems))
    # The dtype is not known here: no model computes in fewer bytes, so this refuses none that would fit.
    check_memory(config, prompts, max_new_tokens, dtype="bfloat16", devices=jax.device_count())
    warn_of_length(config, max(map(len, prompts)), max_new_tokens)
    return Request(prompts, single, DecodeOptions(max_new_tokens, float(temperature), top_k, top_p, ends))


def check_memory(config: ModelConfig, prompts: list[list[int]], new: int, *, dtype: DTypeLike, devices: int) -> None:
    """Refuses a cache that would not fit the memory of a device alone; a CPU's is the host's.

    Raises:
      ValueError: the cache does not fit; the message names max_new_tokens, and the GiB needed and available.
    """
    rows, length = -(-len(prompts) // devices), max(map(len, prompts)) + new
    of_token, of_sequence = (
        sum(math.prod(shape) for mixer in config.layer_mixers for shape in getattr(mixer, kept))
        for kept in ("of_token", "of_sequence")
    )
    needed = rows * (length * of_token * jnp.dtype(dtype).itemsize + of_sequence * jnp.dtype(jnp.float32).itemsize)
    has = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if has is None else has
    if needed > has:
        raise ValueError(
            f"max_new_tokens={new}: the cache of {length} tokens for each of {rows} prompts needs {needed / 2**30:.1f} GiB, "
            f"and a device has {has / 2**30:.1f}; ask for fewer"
        )


def padding_ids(model: Decoder) -> set[int]:
    """Returns the tokens that pad this model's prompts, from its config.json and generation_config.json.

    If neither names a padding token, the end-of-text tokens: users then pad with these.
    """
    config, beside = model.config, generation_config(model.source, model.config)
    named: set[Any] = {config.pad_token_id, beside.get("pad_token_id")} - {None}
    ends = [] if config.eos_token_id is None else np.atleast_1d(config.eos_token_id).tolist()
    return named or set(ends)


def warn_of_length(config: ModelConfig, prompt: int, new: int) -> None:
    """Logs a warning if `prompt` + `new` tokens exceed the known positions; once per number of positions in a process."""
    limit = config.known_positions
    if prompt + new <= limit or config.rope_parameters.rope_type == "dynamic" or limit in _warned_of:
        return
    _warned_of.add(limit)
    _logger.warning(
        "a prompt of %d tokens and max_new_tokens=%d make %d, more than the model's max_position_embeddings of %d: text behind "
        "that position may make no sense",
        prompt, new, prompt + new, limit,
    )  # fmt: skip
