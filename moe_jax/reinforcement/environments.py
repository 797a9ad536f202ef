"""Environments: dialogues in which the model calls tools, or plays a game, before it is rewarded.

An environment is an object with the method `reset(**row)`, called with the prompt's row. Its text, if any, is added to the last
message of the prompt. All other public methods are tools: their type hints and docstrings make the schemas. Optional methods:

    respond(text) -> str | None     the user's next message after an answer without calls, in games; None ends
    get_reward() -> float           the environment's own reward, asked once at the end
    close()                         frees what the environment holds, also after an error

A dialogue is tokens, never rendered again: answers keep their own, and only the messages of tools and users are tokenized.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from moe_jax.checkpoint.messages import as_template_wants
from moe_jax.generation.tool_calls import END_OF_THOUGHT, FORMATS, Call, calls_in, format_of, schemas_of
from moe_jax.reinforcement.prompts import prompt_tokens, seed_of
from moe_jax.reinforcement.samples import Group, Sample

Draw = Callable[[list[int], int, int], Sample]
"""Draws an answer: draw(tokens of the prompt, seed, max_new_tokens). Its tokens include the one that ended it."""
Message = dict[str, Any]
Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens, their log-probabilities, and True for tokens that the model drew."""

_OWN = ("reset", "respond", "get_reward", "close")
"""Public methods that are no tools."""
_MARK = "answer-7f3a61c4"
"""Content of an answer and arguments of its calls, which are found in a rendered conversation."""
_logger = logging.getLogger(__name__)


def play(
    key: int,
    row: Mapping[str, Any],
    environment: Callable[[], Any],
    draw: Draw,
    tokenizer: Any,
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    max_turns: int = 8,
) -> Group:
    """Returns the group of a prompt: a dialogue for each seed, all at once, each in an environment of its own.

    A dialogue ends after an answer without calls and without a response. It also ends after `max_turns` answers, or if the next
    message leaves no room for an answer, with the finish reason `length`. Errors of tools are messages that the model reads. A
    sample whose `respond` or `get_reward` raises has the finish reason `error`.

    Args:
      environment: makes an environment, such as its class.
      seeds: the seed of each sample, which draws its first answer; later answers have seeds of their own.
      max_new_tokens: tokens after the prompt in all, including messages of tools and users.

    Raises:
      ValueError: the prompt is a text, `reset` returns different texts for one row, or the chat template cannot continue.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1; got {max_turns!r}")
    environments = [environment() for _ in seeds]
    try:
        messages, prompt = opening(key, row, environments, tokenizer)
        rendered = partial(_message_tokens, tokenizer, _schemas(environments[0]))
        dialogue = partial(_dialogue, prompt, draw, tokenizer, rendered, max_new_tokens, max_turns)
        with ThreadPoolExecutor(len(seeds), thread_name_prefix="environment") as threads:
            samples = tuple(threads.map(dialogue, environments, seeds))
    finally:
        for each in environments:
            _close(each)
    return Group(key=key, row={**row, "prompt": messages}, prompt_tokens=np.asarray(prompt, np.int32), samples=samples)


def opening(key: int, row: Mapping[str, Any], environments: Sequence[Any], tokenizer: Any) -> tuple[list[Message], list[int]]:
    """Resets environments with a prompt's row; returns the messages with the environments' text, and all tokens with the tools.

    Raises:
      ValueError: the prompt is a text, or the environments return different texts.
    """
    if isinstance(row["prompt"], str):
        raise ValueError(f"an environment needs prompts of messages; the prompt {key} is the text {row['prompt']!r:.80}")
    texts = [each.reset(**row) for each in environments]
    if any(text != texts[0] for text in texts):
        raise ValueError(f"reset must return one text for the samples of a prompt; prompt {key} has {set(texts)!r:.200}")
    messages = [*row["prompt"][:-1], row["prompt"][-1] | {"content": row["prompt"][-1]["content"] + (texts[0] or "")}]
    return messages, prompt_tokens(tokenizer, messages, _schemas(environments[0]))


def check_environment(environment: Callable[[], Any], columns: Iterable[str], tokenizer: Any, ends: Sequence[int]) -> bool:
    """Makes an environment, checks it and closes it; returns True if it has a reward of its own. Calls no `reset`.

    Args:
      columns: the columns of the data, which `reset` gets.
      ends: tokens that end an answer.

    Raises:
      ValueError: it cannot be made, or has no `reset` for these columns. A tool has no type hints or no docstring, or the chat
        template cannot continue a dialogue.
    """
    name = name_of(environment)
    try:
        made = environment()
    except Exception as error:  # of any kind, as the user's code raises it
        raise ValueError(f"the environment {name} cannot be made: {type(error).__name__}: {error}") from error
    try:
        if not callable(reset := getattr(made, "reset", None)):
            raise ValueError(f"the environment {name} has no method reset(**row), which gets the columns of a row")
        inspect.signature(reset).bind(**dict.fromkeys(columns))
        schemas, message = _schemas(made), {"role": "tool" if _tools(made) else "user", "name": "tool", "content": "message"}
        if schemas or hasattr(made, "respond"):
            _message_tokens(tokenizer, schemas, [message], ends)
        return hasattr(made, "get_reward")
    except (TypeError, TypeHintParsingException, DocstringParsingException) as error:
        raise ValueError(f"the environment {name}: {error}") from error
    finally:
        _close(made)


def name_of(environment: Callable[[], Any]) -> str:
    """Returns the name of an environment, which names its reward."""
    return getattr(environment, "__name__", type(environment).__name__)


def _dialogue(
    prompt: list[int],
    draw: Draw,
    tokenizer: Any,
    rendered: Callable[[list[Message], Sequence[int]], list[int]],
    max_new_tokens: int,
    max_turns: int,
    environment: Any,
    seed: int,
) -> Sample:
    """Returns one dialogue as a sample.

    Args:
      rendered: returns the tokens of messages after an answer that ended with a token.
    """
    tools, parts, turns, failures = _tools(environment), list[Part](), list[Message](), list[bool]()
    reward, tokens = None, list(prompt)
    for turn in range(max_turns):
        drawn = draw(tokens, seed_of(seed, turn) if turn else seed, max_new_tokens - len(tokens) + len(prompt))
        parts.append((drawn.tokens, drawn.log_probs, np.ones(len(drawn.tokens), bool)))
        turns.append({"role": "assistant", "content": drawn.text})
        tokens = [*tokens, *drawn.tokens.tolist()]
        reason = drawn.finish_reason
        if reason != "stop":
            break
        calls = _calls(tokenizer, tools, drawn.tokens) if tools else []
        messages = [_answer(tools, call, failures) for call in calls]
        if not calls:
            text, reason = _asked(environment, "respond", drawn.text)
            messages = [] if text is None else [{"role": "user", "content": text}]
        if not messages:
            break
        added = np.asarray(rendered(messages, tokens[-1:]), np.int32)
        if turn + 1 == max_turns or len(tokens) + len(added) >= len(prompt) + max_new_tokens:
            reason = "length"
            break
        parts.append((added, np.zeros(len(added), np.float32), np.zeros(len(added), bool)))
        turns += messages
        tokens += added.tolist()
    if reason in ("stop", "length"):
        reward, failed = _asked(environment, "get_reward")
        reason = failed if failed == "error" else reason
    all_tokens, log_probs, own = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Sample(
        seed=seed,
        tokens=all_tokens,
        log_probs=log_probs,
        own=own,
        finish_reason=reason,
        text=tokenizer.decode(all_tokens, skip_special_tokens=True),
        weights_version=drawn.weights_version,
        # The last answer's prompt is the whole dialogue before it.
        expert_ids=drawn.expert_ids,
        turns=turns,
        reward=reward,
        tool_calls=len(failures),
        tool_failures=sum(failures),
    )


def _asked(environment: Any, method: str, *arguments: str) -> tuple[Any, str]:
    """Returns the result of an optional method, and a finish reason: `stop`, or `error` if it raised."""
    try:
        found = _now(getattr(environment, method, lambda *_: None)(*arguments))
        if method == "get_reward" and found is not None and not math.isfinite(found := float(found)):
            raise ValueError(f"returned {found!r}; a reward is a finite number, or None for no reward")
    except Exception:  # of any kind, as the user's code raises it
        _logger.warning("%s of an environment raised an error, so its sample has failed", method, exc_info=True)
        return None, "error"
    return found, "stop"


def _close(environment: Any) -> None:
    getattr(environment, "close", lambda: None)()


def _schemas(environment: Any) -> list[Message] | None:
    return [get_json_schema(tool) for tool in _tools(environment).values()] or None


def _tools(environment: Any) -> dict[str, Callable[..., Any]]:
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return {name: getattr(environment, name) for name in names if not name.startswith("_") and name not in _OWN}


def _calls(tokenizer: Any, tools: Mapping[str, Callable[..., Any]], tokens: np.ndarray) -> list[Call | Exception]:
    """Returns the calls of an answer in the format of the chat template."""
    schemas = [get_json_schema(tool) for tool in tools.values()]
    calls = FORMATS[format_of(tokenizer.get_chat_template(tools=schemas)) or "hermes"]
    # Calls within reasoning are only thoughts. Special tokens are kept: a call may begin with one.
    return calls_in(tokenizer.decode(tokens).rpartition(END_OF_THOUGHT)[2], calls, schemas_of(schemas))


def _answer(tools: Mapping[str, Callable[..., Any]], call: Call | Exception, failures: list[bool]) -> Message:
    """Returns the message of a tool for a call, or for the error of one, and notes if the call failed."""
    name = "unknown"
    try:
        if isinstance(call, Exception):
            raise call
        name, arguments, _ = call
        if name not in tools:
            raise ValueError(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
        content = str(_now(tools[name](**arguments)))
        failures.append(False)
    except Exception as error:  # of any kind: the call, or the user's code, is wrong
        content = f"error: {type(error).__name__}: {error}"
        failures.append(True)
    return {"role": "tool", "name": str(name), "content": content}


def _message_tokens(tokenizer: Any, schemas: list[Message] | None, messages: list[Message], ends: Sequence[int]) -> list[int]:
    """Returns the tokens of messages after an answer that one of `ends` ended, up to where the next answer begins.

    The template renders a short conversation with the messages. Its part after the end of the answer is tokenized.

    Raises:
      ValueError: the chat template leaves the answer out, or ends it with another token.
    """
    first = messages[0]["content"].strip()
    answer: Message = {"role": "assistant", "content": _MARK}
    if calls := [{"name": each["name"], "arguments": {_MARK: _MARK}} for each in messages if each["role"] == "tool"]:
        answer["tool_calls"] = [{"id": f"call{i:05d}", "type": "function", "function": call} for i, call in enumerate(calls)]
    conversation, tools = as_template_wants(tokenizer, [{"role": "user", "content": "-"}, answer, *messages], schemas)
    text = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
    _, mark, rest = text.rpartition(_MARK)
    tokens = tokenizer(rest, add_special_tokens=False)["input_ids"]
    cut = next((tokens.index(token) for token in (*ends, tokenizer.eos_token_id) if token in tokens), None)
    # An end token that comes only after the first message does not end the answer.
    if not mark or cut is None or (first and first in tokenizer.decode(tokens[:cut])):
        fault = "leaves the answer out" if not mark else f"does not end one with the token {' or '.join(map(str, ends))}"
        name = tokenizer.name_or_path or "the tokenizer"
        raise ValueError(
            f"the chat template of {name} cannot continue a dialogue after an answer: it {fault}; give another template"
        )
    return tokens[cut + 1 :]


def _now(result: Any) -> Any:
    """Returns a method's result, and awaits that of an `async` one."""

    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited()) if inspect.isawaitable(result) else result
