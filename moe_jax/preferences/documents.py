"""Preference data on disk: rows of JSON, CSV or Parquet, checked when they are opened and read by index.

A row has one of the common layouts, and becomes a prompt and its answers:

    {"prompt": "...", "chosen": "...", "rejected": "..."}                   a question and two answers
    {"prompt": [...], "chosen": [...], "rejected": [...]}                   messages; the answers continue the prompt
    {"chosen": [...], "rejected": [...]}                                    whole conversations, equal up to the answers
    {"chosen": "...", "rejected": "..."}                                    whole texts, equal up to the answers
    {"prompt": ..., "completion": ..., "label": true}                       one answer, desirable or not (KTO)

Rows of messages may also have "tools". Other keys are ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.checkpoint.messages import check_messages
from moe_jax.train.data.chat import has_weights
from moe_jax.train.data.documents import IndexedRows
from moe_jax.train.data.layouts import as_list, decoded, parsed
from moe_jax.train.data.opening import indexed_rows
from moe_jax.train.data.turns import as_message, plain_message

Messages = list[dict[str, Any]]


class Judged(NamedTuple):
    """A preference record: a prompt with its chosen and rejected answers, or with one judged answer.

    Attributes:
      prompt: messages, or the text that plain answers continue.
      answers: (chosen, rejected), or one answer; messages, or texts.
      desirable: True if a single answer is desirable; None for pairs.
      tools: the tools of the conversation, if any.
    """

    prompt: str | Messages
    answers: tuple[str, ...] | tuple[Messages, ...]
    desirable: bool | None = None
    tools: list | None = None


def judged(record: Any, *, plain: bool = False) -> Judged:
    """Parses a preference record of any supported layout into prompt and answers.

    A prompt and an answer that are strings become a user's and the assistant's message, unless `plain` is True: then answers
    continue the prompt's text. Whole texts without "prompt" are plain: their prompt is their common beginning.

    Raises:
      ValueError: another layout, or bad messages. The message is a clause to append to the place's name.
    """
    if not isinstance(record, dict):
        raise ValueError(f"needs an object; it is a {type(record).__name__}")
    is_pair = "chosen" in record or "rejected" in record
    keys = ("chosen", "rejected") if is_pair else ("completion", "label")
    if missing := [key for key in keys if key not in record]:
        raise ValueError(
            'needs the keys "chosen" and "rejected", or "prompt", "completion" and "label"; '
            f"it has {', '.join(record) or 'none'}, and no {', '.join(missing)}"
        )
    names = keys if is_pair else keys[:1]
    answers: list[Any] = [_part(name, record[name]) for name in names]
    prompt = None if record.get("prompt") is None else _part("prompt", record["prompt"])
    if len({isinstance(answer, str) for answer in answers}) > 1:
        raise ValueError('"chosen" and "rejected" must both be texts, or both lists of messages')
    if is_pair and answers[0] == answers[1]:
        raise ValueError('"chosen" and "rejected" are equal, so there is nothing to learn from')
    desirable = None if is_pair else _label(record["label"])
    if isinstance(answers[0], str) and not isinstance(prompt, list) and (plain or prompt is None):
        text, texts = _of_texts(prompt, answers)
        return Judged(text, tuple(texts), desirable)
    messages, conversations = _of_messages(prompt, answers)
    for answer in conversations:
        if not any(message["role"] == "assistant" for message in answer):
            raise ValueError("an answer has no message of the assistant, so there is nothing to learn from")
    tools = as_list(record["tools"], "tools") if record.get("tools") else None
    return Judged(messages, tuple(conversations), desirable, tools)


def _of_texts(prompt: str | None, texts: list[str]) -> tuple[str, list[str]]:
    """Returns (prompt, answers): the texts continue the prompt, or begin with it if `prompt` is None."""
    if prompt is not None:
        return prompt, texts
    if len(texts) == 1:
        raise ValueError('has "completion" but no "prompt"')
    first = texts[0]
    common = _common(*texts)
    # A word of the answers is not split: a whole word has other tokens than its parts.
    while common and not first[common - 1].isspace():
        common -= 1
    # The space before a word belongs to the word's token.
    common -= common > 0 and first[common - 1] == " "
    return first[:common], [text[common:] for text in texts]


def _of_messages(prompt: str | Messages | None, answers: list) -> tuple[Messages, list[Messages]]:
    """Returns (prompt, answers) as messages. Whole conversations are cut where they begin to differ."""
    conversations: list[Messages] = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer for answer in answers
    ]
    if isinstance(prompt, str) and conversations[0][0]["role"] == "assistant":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        if all(answer[: len(prompt)] == prompt and len(answer) > len(prompt) for answer in conversations):
            # Some data repeat the prompt in the answers.
            return prompt, [answer[len(prompt) :] for answer in conversations]
        return prompt, conversations
    # A prompt string given with whole conversations repeats their first message.
    shortest = min(map(len, conversations)) - 1
    common = shortest if len(conversations) == 1 else min(_common(*conversations), shortest)
    return conversations[0][:common], [answer[common:] for answer in conversations]


def _common(chosen: Sequence, rejected: Sequence) -> int:
    """Returns the length of the common prefix, in characters or messages."""
    differ = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    return next(differ, min(len(chosen), len(rejected)))


def _part(key: str, part: Any) -> str | Messages:
    """Returns a prompt or an answer: a text, or messages as fine-tuning reads them."""
    if isinstance(part, str):
        if not part.strip():
            raise ValueError(f'"{key}" is an empty text')
        return part
    if not isinstance(part, list) or not part:
        raise ValueError(f'"{key}" must be a text or a list of messages; got {part!r:.80}')
    messages = [plain_message(as_message(message, i), i) for i, message in enumerate(part)]
    check_messages(messages)
    if has_weights(messages):
        raise ValueError(f'"{key}" has a message with another "weight" than 0 and 1; a preference loss takes no others')
    return messages


def _label(label: Any) -> bool:
    if isinstance(label, str):
        # Text tables can only express a label this way.
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower(), label)
    if label not in (True, False):
        raise ValueError(f'"label" must be true or false; got {label!r:.80}')
    return bool(label)


COLUMNS = "chosen", "rejected", "label"
"""Columns of tables that no layout of fine-tuning reads."""
KINDS = {True: 'pairs ("chosen" and "rejected")', False: 'single answers ("completion" and "label")'}


@dataclass(frozen=True)
class Preferences(IndexedRows):
    """A random-access source of `Judged` records.

    Attributes:
      of_pairs: True if a record is a pair. False: it is a single answer.
      unpaired: the rows hold pairs, each read as two records of single answers.
      plain: as in `open_preferences`.
    """

    of_pairs: bool
    unpaired: bool
    plain: bool

    def __len__(self) -> int:
        return super().__len__() * (2 if self.unpaired else 1)

    def __getitem__(self, index: int) -> Judged:
        content = self.content(index // 2 if self.unpaired else index)
        if content is None:
            raise ValueError(f"{self.where(index)} is not as it was when it was opened: put the old file back")
        found = judged(parsed(decoded(content)), plain=self.plain)
        if not self.unpaired:
            return found
        answer: Any = found.answers[index % 2]
        return found._replace(answers=(answer,), desirable=index % 2 == 0)

    def where(self, index: int) -> str:
        """Returns the record's location for error messages: file and line, or a row's number."""
        number = index // 2 if self.unpaired else index
        return self.readers[self.file[number]].place(int(self.line[number]))


def open_preferences(path: str | Path, *, of_pairs: bool = True, plain: bool = False) -> Preferences:
    """Opens and validates preference data: a file of rows, or a folder of such files, in the layouts listed above.

    It reads the same files as fine-tuning: .jsonl, .ndjson, .json, .csv, .tsv and .parquet, and folders of `save_to_disk`.

    Args:
      of_pairs: True for losses of pairs. False for KTO: each pair in the data becomes two single answers.
      plain: prompts and answers that are strings are plain texts. Otherwise they are messages of a user and of the assistant.

    Raises:
      FileNotFoundError: there is no such path, or no file of rows in it.
      ImportError: Parquet, and `datasets` is not installed.
      ValueError: bad rows, listed by file and line; pairs mixed with single answers; single answers for a loss of pairs; or no
        record at all.
    """
    are_pairs: bool | None = None

    def facts_of(_: int, content: bytes) -> tuple[()] | None:
        nonlocal are_pairs
        if not content.strip():
            return None
        is_pair = judged(parsed(decoded(content)), plain=plain).desirable is None
        if are_pairs not in (None, is_pair):
            raise ValueError(f"has {KINDS[is_pair]}, and rows before it have {KINDS[not is_pair]}")
        are_pairs = is_pair
        return ()

    names = dict(digest_of="preferences", what="preference data", row="preferences")
    rows = indexed_rows(path, COLUMNS, facts_of, **names)
    if of_pairs and not are_pairs:
        raise ValueError(f"the loss needs {KINDS[True]}, and {rows[0][0].name} has {KINDS[False]}: use loss kto, or other data")
    unpaired = bool(are_pairs) and not of_pairs
    return Preferences(*rows, of_pairs, unpaired, plain)
