"""One document as it stands in a file, checked: a text file's content, or a line of JSON with "text" or "messages"."""

import json
from typing import Any

from moe_jax.checkpoint.messages import check_messages

BOM = "\N{ZERO WIDTH NO-BREAK SPACE}".encode()
"""A mark that some editors write at the beginning of a file; no part of the text."""
_OR_CHATS = ' (or, in all lines, "messages" for chats)'


def read_record(content: bytes, data_format: str) -> dict[str, Any] | None:
    """Returns {"text": ...} of a file, or the object of a line; None if there is nothing to learn from.

    Raises:
      ValueError: bad content. The message is a clause that follows the name of the place.
    """
    if not content.strip():
        return None
    if b"\0" in content:
        raise ValueError(
            "holds NUL bytes, so it is no UTF-8 text; write Parquet or Arrow as JSON Lines (to_json of datasets), and convert "
            "UTF-16 with iconv -f UTF-16 -t UTF-8"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    record = {"text": text} if data_format == "folder" else _parsed(text)
    key = "messages" if data_format == "chat" else "text"
    if not isinstance(record, dict) or key not in record:
        keys = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f'needs an object with the key "{key}"{_OR_CHATS if key == "text" else ""}; it has {keys}')
    if data_format == "chat":
        _check_messages(record["messages"])
        return record
    if not isinstance(record["text"], str):
        raise ValueError(f'"text" must be a string; it is a {type(record["text"]).__name__}')
    return record if record["text"].strip() else None


def _parsed(text: str) -> Any:
    try:
        record = json.loads(text)
        if "\\u" in text:
            # JSON's escape alone can write a surrogate without its other half.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"not valid Unicode: the escape {half} alone is half of a character") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise ValueError("not readable JSON: a number of more than 4300 digits") from error
    except RecursionError as error:
        raise ValueError("not readable JSON: lists or objects are nested too deeply") from error
    return record


def _check_messages(messages: Any) -> None:
    check_messages(messages)
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        raise ValueError("no assistant message, or all of weight 0, so there is nothing to learn from")
