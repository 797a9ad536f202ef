"""One line of preference data, in any of the layouts that people have, as a prompt and its answers.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                   a question and two answers
    {"prompt": [...], "chosen": [...], "rejected": [...]}                   messages; the answers continue the prompt
    {"chosen": [...], "rejected": [...]}                                    whole conversations, equal up to the answers
    {"chosen": "...", "rejected": "..."}                                    whole texts, equal up to the answers
    {"prompt": ..., "completion": ..., "label": true}                       one answer, desirable or not (KTO)

Beside messages "tools" may stand. Other keys are ignored.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_jax.checkpoint.messages import check_messages
from moe_jax.train.data.chat import has_weights
from moe_jax.train.data.layouts import as_list
from moe_jax.train.data.turns import as_message, plain_message

Messages = list[dict[str, Any]]


class Judged(NamedTuple):
    """A prompt with the answers that people judged.

    Attributes:
      prompt: messages, or the text that plain answers continue.
      answers: (chosen, rejected), or one answer; messages, or texts.
      desirable: of a single answer; None for pairs.
      tools: the tools of the conversation, if any.
    """

    prompt: str | Messages
    answers: tuple[str, ...] | tuple[Messages, ...]
    desirable: bool | None = None
    tools: list | None = None


def judged(record: Any, *, plain: bool = False) -> Judged:
    """Returns a line's prompt and answers.

    A prompt and an answer that are strings become a user's and the assistant's message, unless `plain` says that they are
    texts to be continued. Whole texts without "prompt" are plain: their prompt is the text that both begin with.

    Raises:
      ValueError: another layout, or bad messages. The message is a clause that follows the name of the place.
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
    return Judged(messages, tuple(conversations), desirable, _tools(record))


def _of_texts(prompt: str | None, texts: list[str]) -> tuple[str, list[str]]:
    """Returns (prompt, answers) of texts that continue the prompt, or without one, that begin with it."""
    if prompt is not None:
        return prompt, texts
    if len(texts) == 1:
        raise ValueError('needs a "prompt" beside "completion"')
    first = texts[0]
    common = _common(*texts)
    # A word of the answers is not cut: tokens of a whole word differ from those of its parts.
    while common and not first[common - 1].isspace():
        common -= 1
    # The space before a word belongs to the word's token.
    common -= common > 0 and first[common - 1] == " "
    return first[:common], [text[common:] for text in texts]


def _of_messages(prompt: str | Messages | None, answers: list) -> tuple[Messages, list[Messages]]:
    """Returns (prompt, answers) as messages. Whole conversations are cut where they begin to differ."""
    conversations: list[Messages] = [
        [_message("assistant", answer)] if isinstance(answer, str) else answer for answer in answers
    ]
    if isinstance(prompt, str) and conversations[0][0]["role"] == "assistant":
        prompt = [_message("user", prompt)]
    if isinstance(prompt, list):
        if all(answer[: len(prompt)] == prompt and len(answer) > len(prompt) for answer in conversations):
            # Some data repeat the prompt in the answers.
            return prompt, [answer[len(prompt) :] for answer in conversations]
        return prompt, conversations
    # A text beside whole conversations repeats their first message.
    shortest = min(map(len, conversations)) - 1
    common = shortest if len(conversations) == 1 else min(_common(*conversations), shortest)
    return conversations[0][:common], [answer[common:] for answer in conversations]


def _common(chosen: Sequence, rejected: Sequence) -> int:
    """Returns the number of characters or messages at the beginning that both share."""
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


def _tools(record: dict[str, Any]) -> list | None:
    tools = record.get("tools") or None
    return None if tools is None else as_list(tools, "tools")


def _label(label: Any) -> bool:
    if isinstance(label, str):
        # Tables of text have no other way to say it.
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower(), label)
    if label not in (True, False):
        raise ValueError(f'"label" must be true or false; got {label!r:.80}')
    return bool(label)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
