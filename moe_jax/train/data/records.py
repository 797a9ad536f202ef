"""One document as it stands in a file, checked: a text, a conversation, or a prompt with its continuation."""

import json
from collections.abc import Mapping
from typing import Any

from moe_jax.checkpoint.messages import check_messages
from moe_jax.train.data.layouts import CHATS, converted
from moe_jax.train.data.turns import of_last_turn, plain_message

LEARNED_ANSWERS = ("all", "last")


def read_record(content: bytes, layout: str, learned_answers: str = "all") -> dict[str, Any] | None:
    """Returns {"text"} of a file, or {"text"}, {"messages", ...} or {"prompt", "completion"} of a row; None if it is empty.

    Args: as in `read_row` and `record_of`.

    Raises:
      ValueError: bad content. The message is a clause that follows the name of the place.
    """
    row = read_row(content, layout)
    return None if row is None else record_of(row, layout, learned_answers)


def read_row(content: bytes, layout: str | None) -> Any:
    """Returns the value of a row of JSON, or {"text"} of a text file; None if it is blank.

    Args:
      layout: "folder" for the text of a file, or a layout of `layouts`.

    Raises:
      ValueError: no UTF-8 text, or no JSON.
    """
    if not content.strip():
        return None
    text = decoded(content)
    return {"text": text} if layout == "folder" else parsed(text)


def record_of(row: Any, layout: str, learned_answers: str = "all") -> dict[str, Any] | None:
    """Returns the document of a row, checked; None if its text is blank.

    Args:
      learned_answers: "all", or "last": answers before the last turn get weight 0.

    Raises:
      ValueError: the row does not fit the layout, or has nothing to learn.
    """
    record = converted(row, "text" if layout == "folder" else layout)
    if layout in CHATS:
        return record | {"messages": _checked(record["messages"], learned_answers)}
    if layout == "continuation":
        return record
    if not isinstance(record["text"], str):
        raise ValueError(f'"text" must be a string; it is a {type(record["text"]).__name__}')
    return record if record["text"].strip() else None


def parsed(text: str) -> Any:
    """Returns the value of a text of JSON.

    Raises:
      ValueError: the text is no JSON that can be read, or no Unicode. The message is a clause, as in `read_record`.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            # JSON's escape alone can write a surrogate without its other half.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"not valid Unicode: the escape {half} alone is half of a character") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise ValueError("not readable JSON: a number of more than 4300 digits") from error
    except RecursionError as error:
        raise ValueError("not readable JSON: lists or objects are nested too deeply") from error
    return value


def decoded(content: bytes) -> str:
    """Returns the text of a row.

    Raises:
      ValueError: the bytes are no UTF-8 text. The message is a clause, as in `read_record`.
    """
    if b"\0" in content:
        raise ValueError(
            "holds NUL bytes, so it is no UTF-8 text; convert UTF-16 with iconv -f UTF-16 -t UTF-8, and name files of "
            "Parquet .parquet"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error


def _checked(messages: list[Any], learned_answers: str) -> list[dict[str, Any]]:
    if all(isinstance(message, Mapping) for message in messages):
        messages = [plain_message(message, i) for i, message in enumerate(messages)]
    check_messages(messages)
    if learned_answers == "last":
        messages = of_last_turn(messages)
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        raise ValueError("no assistant message, or all of weight 0, so there is nothing to learn from")
    return messages
