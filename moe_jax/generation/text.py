"""Text in, text out: continues prompts and answers messages, with the tokenizer and defaults in a model's folder."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from moe_jax.checkpoint.companions import generation_config
from moe_jax.checkpoint.hf_load import find_config, from_pretrained
from moe_jax.checkpoint.messages import as_template_wants, check_messages, check_template, check_unicode, without_nulls
from moe_jax.checkpoint.tokenizer import beginning, begun, load_tokenizer
from moe_jax.config import ModelConfig, load_config
from moe_jax.generation.generate import generate
from moe_jax.generation.request import checked_request
from moe_jax.models.decoder import Decoder

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} of each message, or the text of a user's only message."""


NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "typical_p", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "stop_strings")),
    **dict.fromkeys(("constraints", "dola_layers", "top_h", "watermarking_config")),
}
"""Settings of generation_config.json, other than temperature, top_k and top_p, that affect tokens; at their neutral values."""

_logger = logging.getLogger(__name__)

_warned_of: set[str] = set()
"""Combinations of settings that this process has warned about."""


class TextOptions(TypedDict, total=False):
    """The options that `complete` and `chat` share."""

    tokenizer: Any
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int


class ChatOptions(TextOptions, total=False):
    """The options of `chat`."""

    tools: list | None
    template_options: Mapping[str, Any] | None


@overload
def complete(model_or_path: Decoder | str | Path, prompts: str, **options: Unpack[TextOptions]) -> str: ...


@overload
def complete(
    model_or_path: Decoder | str | Path, prompts: list[str] | tuple[str, ...], **options: Unpack[TextOptions]
) -> list[str]: ...


def complete(
    model_or_path: Decoder | str | Path,
    prompts: str | list[str] | tuple[str, ...],
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str | list[str]:
    """Continues texts, and returns only the added text, without special tokens.

    A text ends at an end token of generation_config.json, config.json or the tokenizer, or after `max_new_tokens`.

    Args:
      model_or_path: a model, or its folder or hub id. A folder or hub id is loaded in each call, in bfloat16, onto the default
        device. For several calls, load the model once with `from_pretrained`.
      prompts: one text or several; their tokenizer adds the special tokens that a text begins with, if any.
      tokenizer: a Hugging Face tokenizer. Default: the one in the model's folder.
      max_new_tokens: the maximum number of tokens to add.
      temperature, top_k, top_p: as in `generate`. None: the values of generation_config.json if it sets do_sample, else the
        most likely token each time. Temperature 0 always chooses the most likely token. If generation_config.json has no top_k,
        all tokens can be drawn (transformers uses 50). A warning names its settings that are not applied, such as
        repetition_penalty: `moe_jax.serving.Engine` has that one, and min_p.
      seed: the seed of the draw.

    Returns:
      A str if `prompts` was a str, else a list.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub.
      ValueError: a prompt is empty or no text, no tokenizer is found, or an option is outside its range.
    """
    texts = _added(
        model_or_path,
        tokenizer,
        lambda tokenizer: completion_tokens(tokenizer, [prompts] if isinstance(prompts, str) else prompts),
        dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
    )
    return texts[0] if isinstance(prompts, str) else texts


@overload
def chat(
    model_or_path: Decoder | str | Path, messages: str | Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
) -> str: ...


@overload
def chat(
    model_or_path: Decoder | str | Path, messages: list[Messages] | tuple[Messages, ...], **options: Unpack[ChatOptions]
) -> list[str]: ...


def chat(
    model_or_path: Decoder | str | Path,
    messages: Messages | list[Messages] | tuple[Messages, ...],
    *,
    tools: list | None = None,
    template_options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str | list[str]:
    """Answers conversations, and returns only the answers' text, without special tokens.

    An answer ends like a text in `complete`, or at the token that the chat template puts after an answer.

    Args:
      model_or_path, tokenizer, max_new_tokens, temperature, top_k, top_p, seed: as in `complete`.
      messages: one conversation, or a list of several. A conversation is a list of {"role": ..., "content": ...}, or a str with
        the text of the user's only message.
      tools: functions that the model may call: {"type": "function", "function": {"name": ..., ...}}, or only {"name": ...,
        ...}, or Python functions as the tokenizer's `apply_chat_template` accepts them.
      template_options: further values for the chat template, such as {"enable_thinking": False} for Qwen3.

    Returns:
      A str if there was one conversation, else a list.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub.
      ValueError: a conversation is empty or malformed, ends with the assistant's message or is refused by the template. Also
        if the tokenizer is not found or has no chat template, or an option is outside its range.
    """
    if not isinstance(messages, str | list | tuple):
        raise ValueError(f"messages must be a text, a list of messages, or a list of either; got {messages!r:.80}")
    single = isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Mapping))
    conversations: list = [messages] if single else list(messages)
    texts = _added(
        model_or_path,
        tokenizer,
        lambda tokenizer: chat_prompts(tokenizer, conversations, tools, template_options),
        dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        answers=True,
    )
    return texts[0] if single else texts


def completion_tokens(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of texts, with the special tokens that begin a text, unless it already has them.

    Raises:
      ValueError: there are no prompts, or a prompt is not a text, has no token or holds half surrogates.
    """
    wrong = [prompt for prompt in prompts if not isinstance(prompt, str)] if isinstance(prompts, list | tuple) else [prompts]
    if wrong:
        advice = "; messages go into moe_jax.chat, and token ids into moe_jax.generate"
        raise ValueError(f"prompts must be a text or a list of texts; got {wrong[0]!r:.80}{advice}")
    if not prompts:
        raise ValueError("prompts must hold at least one text; got none")
    for i, prompt in enumerate(prompts):
        check_unicode(prompt, f"prompt {i}")
    # Only the beginning's special tokens: some tokenizers also add an end-of-text token, which would end the prompt.
    begin = beginning(tokenizer)
    tokens = [begun(begin, tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts]
    if not all(tokens):
        raise ValueError(f"prompt {tokens.index([])} is empty: give at least one character to continue")
    return tokens


def chat_prompts(
    tokenizer: Any,
    conversations: Sequence[Messages],
    tools: list | None = None,
    template_options: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
    *,
    continues: bool = False,
) -> list[list[int]]:
    """Returns the token ids of conversations, up to where the chat template begins the assistant's answer.

    Args:
      continues: the last message is the beginning of the answer.
      check: called with each conversation's text before it is tokenized; may raise an error.

    Raises:
      ValueError: there is no template, or it refuses a conversation; or a conversation is empty, malformed, or already has its
        answer. With `continues`: it has no beginning of an answer.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "a chat needs a tokenizer with a chat template, and this one has none; set tokenizer.chat_template, or continue "
            "plain text with moe_jax.complete"
        )
    if not conversations:
        raise ValueError("messages must hold at least one message; got none")
    tokens = []
    for conversation in conversations:
        messages: Any = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
        if isinstance(messages, list | tuple):
            messages = [_filled(message) for message in messages]
        check_messages(messages)
        template = tokenizer.get_chat_template(tools=tools)
        check_template(template, messages, tools)
        if not messages:
            raise ValueError("messages must hold at least one message; got an empty conversation")
        if continues and not (messages[-1]["role"] == "assistant" and messages[-1].get("content")):
            raise ValueError("to continue the final message, it must be the assistant's and not be empty")
        if messages[-1]["role"] == "assistant" and not continues:
            raise ValueError("the conversation ends with the assistant's message; chat answers a user's, or a tool's")
        # Else a client's request to a server could replace the template or the length.
        own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
        if taken := sorted(own & set(template_options or {})):
            raise ValueError(f"template_options are values for the chat template; {', '.join(taken)} cannot be among them")
        options = dict(template_options or {}, add_generation_prompt=not continues)
        messages, written_tools = as_template_wants(tokenizer, messages, tools, **options)
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=written_tools, tokenize=False, continue_final_message=continues, **options
            )
        except Exception as error:  # templates raise arbitrary errors, mostly jinja's TemplateError
            raise ValueError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        check_unicode(text, "the conversation")
        if check is not None:
            check(text)
        tokens.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return tokens


def text_options(
    source: str | Path | None,
    config: ModelConfig,
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    answers: bool = False,
    draws: bool = False,
) -> dict[str, Any]:
    """Returns the options of `generate`: the model's own instead of None, and the tokens that end a text or an answer.

    Logs a warning, once, about settings of the model that change its tokens and are not among the options.

    Args:
      source: the folder with the model's generation_config.json, if any.
      draws: True draws tokens if generation_config.json lacks do_sample, at its temperature or else 1.
    """
    defaults = generation_config(source, config)
    # A value may be null.
    defaults = {name: value for name, value in defaults.items() if value is not None}
    sampling = {"temperature": 1.0, **defaults} if defaults.get("do_sample", draws) else {"temperature": 0.0}
    # Config files express "no restriction" as top_k 0 or -1, and top_p 1.
    sampling |= {name: None for name in ("top_k", "top_p", "min_p") if sampling.get(name, 0) in (0, -1)}
    # transformers applies it to the most likely token too.
    sampling["repetition_penalty"] = defaults.get("repetition_penalty", 1.0)
    _warn_of_unused({name: value for name, value in defaults.items() if name not in options})
    filled = {name: sampling[name] if value is None and name in sampling else value for name, value in options.items()}
    ends = defaults.get("eos_token_id", config.eos_token_id)
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    if answers:
        ends |= ends_of_answers(tokenizer)
    return filled | {"eos_token_id": sorted(ends)}


def _warn_of_unused(settings: Mapping[str, Any]) -> None:
    """Logs the settings of a generation_config.json that affect tokens, once per combination and process."""
    values = {name: settings.get(name) for name in NEUTRAL}
    named = ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, [], NEUTRAL[name]))
    if named and named not in _warned_of:
        _warned_of.add(named)
        _logger.warning("generation_config.json has %s, which change tokens and are not applied here", named)


def added_text(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Returns the text that the new tokens add to a prompt, without special tokens."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    # Decoded without the prompt, the first token lacks the space before it in some tokenizers.
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(new, skip_special_tokens=True)


def _filled(message: Any) -> Any:
    """Returns a message without null keys. An answer without content gets an empty one: clients send it back so."""
    if not isinstance(message, Mapping):
        return message
    made = without_nulls(message)
    is_empty = made.get("role") == "assistant" and made.get("content") is None and not made.get("tool_calls")
    return made | {"content": ""} if is_empty else made


def _added(
    model_or_path: Decoder | str | Path,
    tokenizer: Any,
    encode: Callable[[Any], list[list[int]]],
    options: dict[str, Any],
    *,
    seed: int,
    answers: bool = False,
) -> list[str]:
    """Returns the text after each prompt that `encode` builds with the tokenizer; checks all arguments before weights."""
    if isinstance(model_or_path, Decoder):
        source, config = model_or_path.source, model_or_path.config
    elif isinstance(model_or_path, str | Path):
        source = str(find_config(model_or_path))
        config = load_config(Path(source))
    else:
        raise ValueError(
            f"model_or_path must be a model of moe_jax, a folder or a hub id; got a {type(model_or_path).__name__}"
        )
    if tokenizer is None:
        tokenizer = _tokenizer_beside(source)
    elif not callable(tokenizer):
        raise ValueError(f"tokenizer must be one that moe_jax.load_tokenizer returns; got {tokenizer!r:.80}")
    prompts = encode(tokenizer)
    options = text_options(source, config, tokenizer, options, answers=answers)
    checked_request(config, prompts, **options)
    model = model_or_path
    if not isinstance(model, Decoder):
        # On a CPU with bfloat16 instructions float32 takes 1.2 times as long for a token and 1.8 times for a prompt.
        model = from_pretrained(model, mtp=False)
    new: list = generate(model, prompts, seed=seed, **options)
    return [added_text(tokenizer, prompt, tokens) for prompt, tokens in zip(prompts, new, strict=True)]


def _tokenizer_beside(source: str | None) -> Any:
    """Loads the tokenizer in the model's folder."""
    advice = "pass tokenizer=moe_jax.load_tokenizer(folder_or_hub_id)"
    if source is None:
        raise ValueError(f"this model was not read from a folder, so its tokenizer is unknown: {advice}")
    try:
        return load_tokenizer(source)
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from error


def ends_of_answers(tokenizer: Any) -> set[int]:
    """Returns the special token that the chat template puts after an answer, if any.

    A model that was tuned from a base model ends its answers with this token, while its generation_config.json may name only
    the base model's end.
    """
    answer = "an answer of many words"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may need other messages, such as a system message first
        return set()
    if answer not in text:
        return set()
    behind = tokenizer(text.rpartition(answer)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return {token for token in behind[:1] if token in (added := tokenizer.added_tokens_decoder) and added[token].special}
