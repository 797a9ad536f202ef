"""A request to a model: prompts and options, all checked before anything is computed."""

import logging
import math
import operator
import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from moe_jax.checkpoint.companions import generation_config
from moe_jax.config import ModelConfig
from moe_jax.models.decoder import Decoder

_logger = logging.getLogger(__name__)

_warned_of: set[int] = set()
"""Maximum lengths for which this process has already warned; each is logged once."""


class DecodeOptions(NamedTuple):
    """The static options of a decoding loop. Each new set of values compiles a new program."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]
    """Token ids that each end a sequence; empty: none does."""
    overlap_prefill: bool = False
    """Compute two halves of a device's prompts in one loop (`prefill`)."""


def checked_request(
    config: ModelConfig,
    prompt_tokens,
    padding: tuple[Any, Collection[int]] = (None, ()),
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | Sequence[int] | None,
) -> tuple[list[list[int]], bool, DecodeOptions]:
    """Validates the arguments of `generate`; returns the prompts, whether one flat prompt was given, and the options.

    Warns once if a sequence may exceed the length that the model was trained for.

    Args:
      padding: the user's attention mask, and the tokens that tokenizers pad with (`padding_ids`).

    Other arguments as in `generate`.

    Raises:
      ValueError: `as_prompts` refuses the prompts; or options are outside their ranges, all listed in one error. Or the cache
        would not fit a device's memory in any dtype.
    """
    prompts, single = as_prompts(prompt_tokens, config.vocab_size, *padding)
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
    # The dtype is not known here. No model uses fewer bytes than bfloat16, so nothing that fits is refused.
    check_memory(config, prompts, max_new_tokens, dtype="bfloat16", devices=jax.device_count())
    warn_of_length(config, max(map(len, prompts)), max_new_tokens)
    return prompts, single, DecodeOptions(max_new_tokens, float(temperature), top_k, top_p, ends)


def check_memory(config: ModelConfig, prompts: list[list[int]], new: int, *, dtype: DTypeLike, devices: int) -> None:
    """Checks that the KV cache alone fits into a device's memory (the host's memory for a CPU).

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
    """Returns the token ids used to pad prompts, from the model's config.json and generation_config.json.

    If neither names a padding token, returns the end-of-text tokens, with which users then pad.
    """
    config, beside = model.config, generation_config(model.source, model.config)
    named: set[Any] = {config.pad_token_id, beside.get("pad_token_id")} - {None}
    ends = [] if config.eos_token_id is None else np.atleast_1d(config.eos_token_id).tolist()
    return named or set(ends)


def warn_of_length(config: ModelConfig, prompt: int, new: int) -> None:
    """Logs a warning if `prompt` + `new` tokens exceed the model's context length; once per length in a process."""
    limit = config.known_positions
    if prompt + new <= limit or config.rope_parameters.rope_type == "dynamic" or limit in _warned_of:
        return
    _warned_of.add(limit)
    _logger.warning(
        "a prompt of %d tokens and max_new_tokens=%d make %d, more than the model's max_position_embeddings of %d: text beyond "
        "that position may make no sense",
        prompt, new, prompt + new, limit,
    )  # fmt: skip


PROMPT_BUCKET = 64
"""Prompt lengths are padded to a multiple of this many tokens, so that prompts of similar lengths share a compilation."""


def as_prompts(
    prompt_tokens: Any, vocab_size: int, attention_mask: Any = None, padding_ids: Collection[int] = ()
) -> tuple[list[list[int]], bool]:
    """Returns the prompts as lists of ints, and True if one flat prompt was given.

    Args:
      attention_mask: 1 for tokens of a prompt and 0 for padding, in the shape of `prompt_tokens`.
      padding_ids: the tokens that tokenizers use to pad this model's prompts.

    Raises:
      ValueError: text or a tokenizer's result in place of ids; an empty prompt; or an id outside the vocabulary. Also a mask
        of another shape, or prompts that look padded and have no mask.
    """
    _refuse_text(prompt_tokens)
    rows, single = _rows(prompt_tokens, "prompt_tokens")
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    elif pad := _padding_in(rows, padding_ids):
        raise ValueError(
            f"prompt_tokens {pad}, which pads prompts of unequal lengths: pass the tokenizer's attention_mask too, or prompts "
            "without padding. If they are meant as they are, pass attention_mask=np.ones_like(prompt_tokens)"
        )
    if not rows or not all(rows):
        raise ValueError("prompt_tokens must hold at least one prompt of at least one token; got " + repr(rows)[:80])
    return [[_token_id(token, number, vocab_size) for token in row] for number, row in enumerate(rows)], single


def left_padded(prompts: list[list[int]], multiple: int) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"]]:
    """Returns left-padded tokens and segment ids, with padding rows up to a `multiple` of rows."""
    padded_length = -(-max(map(len, prompts)) // PROMPT_BUCKET) * PROMPT_BUCKET
    rows = -(-len(prompts) // multiple) * multiple
    tokens = np.zeros((rows, padded_length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, padded_length - len(prompt) :] = prompt
        segment_ids[row, padded_length - len(prompt) :] = 1
    return tokens, segment_ids


def new_tokens(
    produced: Int[Array | np.ndarray, "batch max_new_tokens"], lengths: Int[Array | np.ndarray, "batch"], single: bool
) -> list[list[int]] | list[int]:
    """Returns the valid tokens of each row, or of the only row if `single` (one flat prompt was given)."""
    rows = [row[:length].tolist() for row, length in zip(produced, lengths, strict=True)]
    return rows[0] if single else rows


def _refuse_text(prompts: Any) -> None:
    """Raises a ValueError that names the right call for text, messages, or a tokenizer's result."""
    wrong = "prompt_tokens must be token ids; got"
    first = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(prompts, str):
        raise ValueError(f"{wrong} the text {_short(prompts)}: moe_jax.complete(model, {_short(prompts)}) takes text")
    if isinstance(first, str):
        raise ValueError(f"{wrong} a list of texts: moe_jax.complete(model, [{_short(first)}, ...]) takes texts")
    if isinstance(first, Mapping) and "role" in first:
        raise ValueError(f"{wrong} messages: moe_jax.chat(model, messages) takes them")
    if isinstance(prompts, Mapping):
        mask = ", attention_mask=encoded['attention_mask']" if "attention_mask" in prompts else ""
        raise ValueError(f"{wrong} a {type(prompts).__name__}: generate(model, encoded['input_ids']{mask}) takes its contents")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _rows(values: Any, name: str) -> tuple[list[list[Any]], bool]:
    """Returns rows of numbers, and True if there was one flat row."""
    try:
        rows = values.tolist() if hasattr(values, "tolist") else list(values)
        single = bool(rows) and np.ndim(rows[0]) == 0
        rows = [rows] if single else [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError as error:
        raise ValueError(f"{name} must be a list of integers, or a list of such lists; got {values!r:.80}") from error
    return rows, single


def _unpadded(rows: list[list[Any]], attention_mask: Any) -> list[list[Any]]:
    """Returns the tokens of each row at which the mask is 1."""
    masks, _ = _rows(attention_mask, "attention_mask")
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise ValueError(
            f"attention_mask must have prompt_tokens' shape; got rows of {sorted({len(mask) for mask in masks})} for "
            f"{sorted({len(row) for row in rows})} tokens, {len(masks)} for {len(rows)}"
        )
    unpadded = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ones = np.flatnonzero(mask)
        if not set(mask) <= {0, 1} or not ones.size or ones[-1] - ones[0] >= ones.size:
            raise ValueError(
                f"attention_mask must be one run of ones in each row, and zeros before or after it; row {number} is "
                f"{list(map(int, mask))!r:.80}"
            )
        unpadded.append(row[ones[0] : ones[-1] + 1])
    return unpadded


def _padding_in(rows: list[list[Any]], padding_ids: Collection[int]) -> str | None:
    """Describes why rows look padded; None if they do not.

    Rows look padded if a row begins, or ends, with at least two padding tokens. Rows of one length also look padded if some
    begin, or end, with a padding token and others do not.
    """
    one_length = len({len(row) for row in rows}) == 1
    for token in sorted(padding_ids):
        for verb, directed in (("begin", rows), ("end", [row[::-1] for row in rows])):
            padded = sum(row[:1] == [token] for row in directed)
            if any(row[:2] == [token, token] for row in directed) or (one_length and 0 < padded < len(rows)):
                return f"{verb} with the padding token {token} in {padded} of {len(rows)} rows"
    return None


def _token_id(token: Any, number: int, vocab_size: int) -> int:
    try:
        index = operator.index(token)
    except TypeError:
        index = -1
    if isinstance(token, bool) or not 0 <= index < vocab_size:
        raise ValueError(f"prompt {number} holds {token!r}; token ids are integers from 0 to {vocab_size - 1}")
    return index
