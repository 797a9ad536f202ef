"""Prompts on disk: rows with a prompt, and columns that rewards read, in an order of their own in each epoch.

{"prompt": "...", "answer": "42"}                                       a text that answers continue
{"prompt": [{"role": "user", "content": "..."}], "answer": "42"}        messages, which the chat template renders
{"data_source", "prompt", "ability", "reward_model", "extra_info"}      verl's rows, as they are
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from moe_jax.checkpoint.messages import check_messages, check_unicode
from moe_jax.generation.text import chat_prompts, completion_tokens
from moe_jax.train.data.documents import IndexedRows
from moe_jax.train.data.layouts import decoded, parsed
from moe_jax.train.data.opening import indexed_rows
from moe_jax.train.data.turns import as_message, plain_message

KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra", "finish_reasons", "seeds")
"""Keywords of every reward function, which no column of the data may have as its name."""


@dataclass(frozen=True)
class Prompts(IndexedRows):
    """A random-access source of rows: {"prompt": a text or messages, column: value}.

    Attributes:
      columns: all columns; a row without one of them has None there.
      left_out: the number of prompts that `prompts_within` left out.
    """

    columns: tuple[str, ...]
    left_out: int = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        content = self.content(index)
        if content is None:
            raise ValueError(f"{self.where(index)} is not as it was when it was opened: put the old file back")
        return dict.fromkeys(self.columns) | _row(content)

    def where(self, index: int) -> str:
        """Returns the row's location for error messages: file and line, or a row's number."""
        return self.readers[self.file[index]].place(int(self.line[index]))


def open_prompts(path: str | Path) -> Prompts:
    """Opens and checks prompts: a file of rows, or a folder of such files. The rows are listed above.

    It reads the same files as fine-tuning: .jsonl, .ndjson, .json, .csv, .tsv and .parquet, and folders of `save_to_disk`.

    Raises:
      FileNotFoundError: there is no such path, or no file of rows in it.
      ImportError: Parquet, and `datasets` is not installed.
      ValueError: bad rows, listed by file and line; a column named like a keyword of reward functions; or no row at all.
    """
    columns: dict[str, None] = {}

    def facts_of(_: int, content: bytes) -> tuple[()] | None:
        if not content.strip():
            return None
        columns.update(dict.fromkeys(_row(content)))
        return ()

    rows = indexed_rows(path, None, facts_of, digest_of="prompts", what="prompts", row="a prompt")
    return Prompts(*rows, tuple(columns))


def prompts_within(prompts: Prompts, max_tokens: int, length_of: Callable[[Mapping[str, Any]], int]) -> Prompts:
    """Returns the prompts of at most `max_tokens` tokens; `left_out` counts the others.

    Args:
      length_of: returns the number of tokens of a row's prompt.

    Raises:
      ValueError: no prompt is left, or `length_of` refuses a row; the message names file and line.
    """
    lengths = np.zeros(len(prompts), np.int64)
    for index in range(len(prompts)):
        try:
            lengths[index] = length_of(prompts[index])
        except ValueError as error:
            raise ValueError(f"{prompts.where(index)}: {error}") from error
    kept: Bool[np.ndarray, " rows"] = lengths <= max_tokens
    if not kept.any():
        raise ValueError(
            f"no prompt has at most {max_tokens} tokens: the shortest, {prompts.where(int(lengths.argmin()))}, has "
            f"{lengths.min()}; allow longer prompts, or give other data"
        )
    places = {name: getattr(prompts, name)[kept] for name in ("file", "line", "offset", "size")}
    return replace(prompts, **places, left_out=prompts.left_out + int((~kept).sum()))


def prompt_at(prompts: Prompts, key: int, seed: int | None) -> dict[str, Any]:
    """Returns the row at a position that is counted over all epochs. Each epoch has its own order.

    Args:
      seed: decides the order. None: the data's own.
    """
    epoch, place = divmod(key, len(prompts))
    return prompts[place if seed is None else int(_order(seed, epoch, len(prompts))[place])]


def prompt_tokens(tokenizer: Any, prompt: Any, tools: list | None = None) -> list[int]:
    """Returns the tokens of a row's prompt: a text, or messages up to where the chat template begins the answer.

    Raises:
      ValueError: the chat template refuses the messages, or there is none.
    """
    if isinstance(prompt, str):
        return completion_tokens(tokenizer, [prompt])[0]
    return chat_prompts(tokenizer, [prompt], tools)[0]


def seed_of(*names: int) -> int:
    """Returns the 32-bit seed of a name, such as (the run's seed, step, key of the prompt, attempt).

    It is the first 4 bytes of the name's BLAKE2b hash, so it depends neither on the order nor on the time of requests.
    """
    digest = hashlib.blake2b("/".join(str(int(name)) for name in names).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> Int[np.ndarray, " rows"]:
    return np.random.default_rng((seed, epoch)).permutation(length)


def _row(content: bytes) -> dict[str, Any]:
    """Returns a line's row, its messages as chat templates read them.

    Raises:
      ValueError: there is no prompt, or a bad one. The message is a clause to append to the place's name.
    """
    record = parsed(decoded(content))
    if not isinstance(record, dict):
        raise ValueError(f"needs an object; it is a {type(record).__name__}")
    if record.get("prompt") is None:
        raise ValueError(f'needs the key "prompt"; it has {", ".join(record) or "none"}')
    if taken := [name for name in KEYWORDS if name in record]:
        raise ValueError(f'has the column "{taken[0]}", a keyword of reward functions; rename it')
    prompt = record["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError('"prompt" is an empty text')
        check_unicode(prompt, '"prompt"')
        return record
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f'"prompt" must be a text or a list of messages; got {prompt!r:.80}')
    messages = [plain_message(as_message(message, i), i) for i, message in enumerate(prompt)]
    check_messages(messages)
    if messages[-1]["role"] == "assistant":
        raise ValueError('"prompt" ends with the assistant\'s message; it must end with the message to answer')
    return record | {"prompt": messages}
