"""A request to the engine: sampling options, checked before anything is computed, and the completion."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np

from moe_jax.kernels.attention.paged import PAGE_SIZE

FinishReason = Literal["stop", "length", "abort", "error"]

KvDtype = Literal["model", "fp8"]
"""How pages hold keys and values: "model" is the model's dtype."""

DrawnToken = tuple[int, float, dict[int, float] | None]
"""A token, its log-probability, and the most likely alternatives', if the request asks for some."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives for a token, as in OpenAI's API."""

MAX_BIASES = 300
"""Maximum number of tokens in `logit_bias`, as in OpenAI's API; the device reserves this number for each slot."""

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""The device computes in f32: a smaller number is 0 there, a larger one infinite."""


@dataclass(frozen=True)
class SamplingOptions:
    """Controls how the tokens of a request are drawn, when they end, and which extra results are returned.

    Temperature 0 chooses the most likely token. The repetition penalty is transformers', the others are OpenAI's.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers that are added to the logits of tokens."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end a sequence; they are not part of its text, unless `include_stop` is set."""
    ignore_eos: bool = False
    """True: the model's own end tokens do not end a sequence."""
    seed: int | None = None
    """None: a random one. Draws depend only on seed and position."""
    n: int = 1
    """Number of continuations of each prompt."""
    logprobs: int | None = None
    """Number of alternatives that are returned with each token; 0: only the token's own log-probability."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    return_experts: bool = False
    """True: each token's experts are returned, layer by layer."""
    skip_special_tokens: bool = True
    """False: special tokens are part of the text, except one that ends it."""
    include_stop: bool = False
    """True: the stop text, or the token that ends a sequence, is part of the text. Special tokens are still skipped."""
    min_tokens: int = 0
    """Number of new tokens before which neither an end token nor a stop text ends a sequence."""
    bad_words: tuple[str, ...] = ()
    """Texts that new tokens must not spell, at the beginning of a text or after a space."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn, including those that end a sequence; None: all."""
    grammar: str | None = None
    """The grammar of the new text (`serving.grammar`). It allows the sequence's end tokens only where the text is complete."""
    adapter: str | None = None
    """The name of an adapter that the engine has loaded (`Engine.load_adapter`); None: the model without one."""

    def problems(self, vocab_size: int) -> list[str]:
        """Returns a sentence for each option with a wrong type or out of its range."""
        rules: dict[str, tuple[Any, str]] = {
            "max_new_tokens": (_is_integer(self.max_new_tokens, 1), "an integer, at least 1"),
            "temperature": (_is_number(self.temperature, 0), "a finite number, 0 or more"),
            "top_k": (self.top_k is None or _is_integer(self.top_k, 1), "None or an integer, at least 1"),
            "top_p": (self.top_p is None or _is_number(self.top_p, SMALLEST, 1), "None or a number in (0, 1]"),
            "min_p": (self.min_p is None or _is_number(self.min_p, 0, 1), "None or a number in [0, 1]"),
            "repetition_penalty": (_is_number(self.repetition_penalty, SMALLEST), "a finite number above 0"),
            "presence_penalty": (_is_number(self.presence_penalty, -2, 2), "a number in [-2, 2]"),
            "frequency_penalty": (_is_number(self.frequency_penalty, -2, 2), "a number in [-2, 2]"),
            "logit_bias": (
                isinstance(self.logit_bias, Mapping)
                and len(self.logit_bias) <= MAX_BIASES
                and all(_is_integer(token, 0, vocab_size - 1) for token in self.logit_bias)
                and all(_is_number(bias, -100, 100) for bias in self.logit_bias.values()),
                f"a mapping of at most {MAX_BIASES} token ids below {vocab_size} to numbers in [-100, 100]",
            ),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, tuple | list)
                and all(_is_integer(token, 0, vocab_size - 1) for token in self.stop_token_ids),
                f"a tuple of token ids below {vocab_size}",
            ),
            "stop": (
                isinstance(self.stop, tuple | list) and all(isinstance(text, str) and text for text in self.stop),
                "a tuple of texts, none of them empty",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "seed": (self.seed is None or _is_integer(self.seed, 0, 2**32 - 1), "None or an integer in [0, 2**32)"),
            "n": (_is_integer(self.n, 1), "an integer, at least 1"),
            "logprobs": (_is_count(self.logprobs), f"None or an integer in [0, {MAX_LOGPROBS}]"),
            "prompt_logprobs": (_is_count(self.prompt_logprobs), f"None or an integer in [0, {MAX_LOGPROBS}]"),
            "return_experts": (isinstance(self.return_experts, bool), "True or False"),
            "include_stop": (isinstance(self.include_stop, bool), "True or False"),
            "skip_special_tokens": (isinstance(self.skip_special_tokens, bool), "True or False"),
            "min_tokens": (
                _is_integer(self.min_tokens, 0) and not self.min_tokens > self.max_new_tokens,
                "an integer from 0 to max_new_tokens",
            ),
            "bad_words": (
                isinstance(self.bad_words, tuple | list) and all(isinstance(word, str) and word for word in self.bad_words),
                "a tuple of texts, none of them empty",
            ),
            "allowed_token_ids": (
                self.allowed_token_ids is None
                or isinstance(self.allowed_token_ids, tuple | list)
                and bool(self.allowed_token_ids)
                and all(_is_integer(token, 0, vocab_size - 1) for token in self.allowed_token_ids),
                f"None or a tuple of token ids below {vocab_size}, not empty",
            ),
            "grammar": (self.grammar is None or isinstance(self.grammar, str) and bool(self.grammar), "None or a text"),
            "adapter": (self.adapter is None or isinstance(self.adapter, str) and bool(self.adapter), "None or a name"),
        }
        wrong = {name: wanted for name, (fits, wanted) in rules.items() if not fits}
        return [f"{name} must be {wanted}; got {_shortened(getattr(self, name))}" for name, wanted in wrong.items()]


@dataclass(frozen=True)
class EngineLimits:
    """Sizes that an engine is built for, on each of its devices. They set its memory, and the requests that it refuses.

    Raises:
        ValueError: A limit is not an integer of at least 1, or a step has no room for one token of each sequence. Also an
            unknown `kv_dtype`.
    """

    max_sequences: int = 256
    """Number of sequences that may run at once: slots on the device."""
    max_tokens_per_step: int = 8192
    """Number of tokens of a step: one for each sequence that decodes, the rest for chunks of prompts."""
    max_chunks_per_step: int = 128
    """Maximum number of prompts with a chunk in one step."""
    max_length: int = 8192
    """Maximum number of tokens of a sequence, prompt and new tokens together."""
    num_pages: int = 4096
    """Number of pages of keys and values, including page 0, which no sequence owns."""
    max_waiting: int = 1024
    """Largest number of sequences that wait for a slot or for pages, on all devices together."""
    replicas: int = 1
    """Number of copies of all weights, each with sequences of its own, on as many devices each as hold the model."""
    kv_dtype: KvDtype = "model"
    """"fp8" holds keys and values in pages of about half the bytes of bf16 (`kernels.attention.paged.fp8`)."""
    max_adapters: int = 0
    """Number of adapters that the device has room for (`Engine.load_adapter`); 0: programs are compiled without adapters."""
    max_adapter_rank: int = 32
    """Largest rank of these adapters. Each occupies memory, and costs time, as if it had this rank."""

    @property
    def longest_request(self) -> int:
        """Maximum number of tokens of a request, prompt and new tokens: limited by `max_length` and the pages."""
        return min(self.max_length, self.longest_in_pages)

    @property
    def longest_in_pages(self) -> int:
        """Tokens of the longest sequence that fits in all pages. Its last token is sampled but never computed."""
        return (self.num_pages - 1) * PAGE_SIZE + 1

    def __post_init__(self):
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kv_dtype"}
        problems = [
            f"{name} must be an integer, at least {least}; got {value!r}"
            for name, value in values.items()
            if not _is_integer(value, least := int(name != "max_adapters"))
        ]
        if not problems and self.max_tokens_per_step < self.max_sequences:
            problems.append(
                f"max_tokens_per_step must be at least max_sequences, one token for each; "
                f"got {self.max_tokens_per_step} and {self.max_sequences}"
            )
        if not problems and self.num_pages < 2:
            problems.append("num_pages must be at least 2, because no sequence owns page 0; got 1")
        if self.kv_dtype not in get_args(KvDtype):
            problems.append(f'kv_dtype must be "model" or "fp8"; got {self.kv_dtype!r}')
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    tokens: list[int]
    """New tokens, including the one that ended the sequence."""
    finish_reason: FinishReason
    """`stop`: an end token or a stop text; `length`: the requested number of tokens; `abort`; `error`."""
    logprobs: list[float] | None = None
    """Log-probability of each new token under the raw logits, or after `Engine.temper_logprobs` under logits / temperature."""
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """For each prompt token: {token: log-probability} of itself and of the most likely ones; None for the first."""
    text: str | None = None
    experts: Any = None
    """Experts of each computed position, of shape (positions, layers, choices)."""
    weights_version: int = 0
    """Number of weight updates before the request started. Its later tokens may come from newer weights."""
    cached_tokens: int = 0
    """Number of the prompt's tokens whose keys and values were found in the cache."""
    seed: int | None = field(default=None, compare=False)
    """The seed of the draws: a request with it and n=1 draws the same tokens."""


def check_prompts(prompts: Any) -> None:
    """Refuses anything but a list of prompts, such as texts or a single prompt.

    Raises:
        ValueError: `prompts` is not a list of prompts.
    """
    if not hasattr(prompts, "__len__") or isinstance(prompts, str) or any(isinstance(each, str | Integral) for each in prompts):
        raise ValueError(
            f"prompts must be a list of lists of token ids; got {_shortened(prompts)}; for text see moe_jax.complete"
        )


def checked(prompt: Any, options: SamplingOptions, limits: EngineLimits, vocab_size: int) -> list[int]:
    """Returns the prompt as a list of ints, if an engine of these limits can run the request.

    Raises:
        ValueError: The prompt is no list of token ids, is empty, or is too long; or options are wrong. Lists all problems.
    """
    if not isinstance(options, SamplingOptions):
        raise ValueError(f"options must be SamplingOptions; got {options!r}")
    problems = _problems_of_prompt(prompt, vocab_size) + options.problems(vocab_size)
    problems = problems or _problems_of_length(len(prompt), options.max_new_tokens, limits)
    if not problems and options.n > limits.max_waiting:
        problems = [f"n must be at most max_waiting={limits.max_waiting}; got {options.n}"]
    if problems:
        raise ValueError("; ".join(problems))
    return np.asarray(prompt).tolist()


def fitted(options: SamplingOptions, prompt: list[int], limits: EngineLimits) -> SamplingOptions:
    """Returns options with `max_new_tokens` reduced to fit after a prompt; 0 means all that fit.

    The result is at least 1, so that the engine itself reports a prompt that is too long.
    """
    room = max(1, limits.longest_request - len(prompt))
    return replace(options, max_new_tokens=min(options.max_new_tokens or room, room))


def seeds_of(options: SamplingOptions) -> list[int]:
    """Returns a seed for each of the n continuations; the first is the request's own, the others are hashes of it."""
    seed = secrets.randbits(32) if options.seed is None else int(options.seed)
    others = (blake2b(f"{seed} {index}".encode(), digest_size=4).digest() for index in range(1, options.n))
    return [seed, *(int.from_bytes(other) for other in others)]


def _problems_of_prompt(prompt: Any, vocab_size: int) -> list[str]:
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        ids = np.asarray(None)
    if ids.ndim == 1 and ids.size == 0:
        return ["the prompt is empty; it must have at least one token"]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return [f"the prompt must be a flat list of token ids; got {_shortened(prompt)}"]
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    return [f"the prompt has token {outside[0]}, outside the vocabulary of {vocab_size}"] if outside.size else []


def _problems_of_length(length: int, new: int, limits: EngineLimits) -> list[str]:
    most = limits.longest_request
    if length + new <= most:
        return []
    pages = f"the {most} tokens that the engine's pages hold"
    bound = f"the engine's max_length={most}" if most == limits.max_length else pages
    if length >= most:
        return [f"a prompt of {length} tokens and the first token of its answer exceed {bound}"]
    return [f"a prompt of {length} tokens and max_new_tokens={new} exceed {bound}"]


def _is_integer(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _is_number(value: Any, low: float, high: float = LARGEST) -> bool:
    # NumPy would round the bounds to the number's dtype.
    value = value.item() if isinstance(value, np.floating) else value
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    # Compared without a cast: an integer may be too large for a float.
    return is_real and low <= value <= high


def _is_count(value: Any) -> bool:
    return value is None or _is_integer(value, 0, MAX_LOGPROBS)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
