"""Layouts of rows: recognised by their keys, and converted to texts, conversations, or continuations.

chat          {"messages": [{"role": "user", "content": ...}, ...], "tools"}
text          {"text": ...}
sharegpt      {"conversations": [{"from": "human", "value": ...}, ...], "system", "tools"}
alpaca        {"instruction": ..., "input", "output": ..., "system", "history"}
pairs         {"prompt": ..., "completion": ..., "system", "tools"}: strings or lists of messages, which become a chat
continuation  {"prompt": ..., "completion": ...}: two texts; only the second is learned; no chat template
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_jax.checkpoint.messages import check_messages
from moe_jax.train.data.turns import as_message, of_last_turn, plain_message


class Layout(NamedTuple):
    """The keys that identify a row layout, such as "messages" for chat.

    Attributes:
      needed: alternatives; a row has all keys of one of them.
      further: optional keys.
    """

    needed: tuple[tuple[str, ...], ...]
    further: tuple[str, ...] = ()


_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("query", "response"), ("question", "answer"))
LAYOUTS = {
    "chat": Layout((("messages",),), ("tools",)),
    "text": Layout((("text",),)),
    "sharegpt": Layout((("conversations",),), ("system", "tools")),
    "alpaca": Layout(
        (("instruction", "output"), ("instruction", "response")), ("input", "context", "system", "history", "tools")
    ),
    "pairs": Layout(_PAIRS, ("system", "tools")),
    "continuation": Layout(_PAIRS),
}
"""The layouts, in the order in which they are tried."""
KEYS = {key for layout in LAYOUTS.values() for keys in (*layout.needed, layout.further) for key in keys}
"""All keys that some layout reads."""
CHATS = {"chat", "sharegpt", "alpaca", "pairs"}
"""Layouts whose rows become conversations."""
PREFERENCES = {"chosen", "rejected"}
"""Keys of rows that compare two answers."""


def layout_of(row: Any) -> str | None:
    """Returns the first layout whose required keys the row has; None if no layout matches."""
    if not isinstance(row, dict):
        return None
    return next((name for name, layout in LAYOUTS.items() if _keys(row, layout) is not None), None)


def unread_keys(row: Mapping[str, Any], layout: str) -> set[str]:
    """Returns the row's keys that the layout ignores."""
    return set(row) - set(_keys(row, LAYOUTS[layout]) or ()) - set(LAYOUTS[layout].further)


def converted(row: Any, layout: str) -> dict[str, Any]:
    """Converts a row to {"text"}, {"messages", "tools"} or {"prompt", "completion"}; other keys are unchanged.

    Raises:
      ValueError: keys are missing or have wrong values. The caller prepends the location to the message.
    """
    keys = _keys(row, LAYOUTS[layout]) if isinstance(row, dict) else None
    if keys is None:
        raise ValueError(_wanted(row, layout))
    if layout == "text":
        return row
    if layout == "continuation":
        prompt, completion = (row[key] for key in keys)
        for key in keys:
            if not isinstance(row[key], str):
                raise ValueError(f'"{key}" must be a string; it is a {type(row[key]).__name__}')
        return {"prompt": prompt, "completion": _not_empty(completion, keys[1])}
    if layout == "chat":
        # Other keys stay: templates may read them.
        return _with_tools({**row, "messages": as_list(row["messages"], "messages")}, row)
    if layout == "sharegpt":
        messages = [as_message(turn, i) for i, turn in enumerate(as_list(row["conversations"], "conversations"))]
    elif layout == "alpaca":
        messages = _alpaca(row, keys[1])
    else:
        messages = _pair(row[keys[0]], row[keys[1]], keys)
    if isinstance(system := row.get("system"), str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    return _with_tools({"messages": messages}, row)


def no_layout(row: Any) -> str:
    """Returns the error message for a row that matches no layout, without its location, which the caller prepends."""
    if isinstance(row, dict) and PREFERENCES <= row.keys():
        return _wanted(row, "text")
    keys = {name: " and ".join(f'"{key}"' for key in layout.needed[0]) for name, layout in LAYOUTS.items()}
    known = ", ".join(f"{of} ({name})" for name, of in keys.items())
    has = f"the keys {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
    rename = "other columns are named as in FILE,prompt=COLUMN,completion=COLUMN"
    return f"has no known layout; a row needs {known}; {rename}; it has {has}"


def as_list(value: Any, key: str) -> list:
    """Returns a list, parsed from JSON if it is given as a string (as in tables).

    Raises:
      ValueError: the value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list):
        raise ValueError(f'"{key}" must be a list of objects; got {value!r:.80}')
    return value


def _keys(row: Mapping[str, Any], layout: Layout) -> tuple[str, ...] | None:
    return next((keys for keys in layout.needed if all(key in row for key in keys)), None)


def _wanted(row: Any, layout: str) -> str:
    """Describes the keys that the row should have, and those it has."""
    if isinstance(row, dict) and PREFERENCES <= row.keys():
        return "holds a preference (chosen, rejected), and next tokens are learned from one answer; it has both"
    keys = " and ".join(f'"{key}"' for key in LAYOUTS[layout].needed[0])
    has = f"the keys {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
    many = "s" if len(LAYOUTS[layout].needed[0]) > 1 else ""
    return f"needs an object with the key{many} {keys}; it has {has}"


def _with_tools(record: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("tools"):
        return record | {"tools": as_list(row["tools"], "tools")}
    return {key: value for key, value in record.items() if key != "tools"}


def _alpaca(row: Mapping[str, Any], answer_key: str) -> list[dict[str, Any]]:
    for key in ("instruction", "input", "context", answer_key):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(f'"{key}" must be a string; it is a {type(row[key]).__name__}')
    messages = []
    for pair in as_list(row.get("history") or [], "history"):
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f'"history" must be a list of [question, answer]; got {pair!r:.80}')
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = (row["instruction"], row.get("input"), row.get("context"))
    question = {"role": "user", "content": "\n\n".join(part for part in parts if part)}
    return [*messages, question, {"role": "assistant", "content": _not_empty(row[answer_key] or "", answer_key)}]


def _pair(prompt: Any, completion: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns a chat from a prompt (not learned) and its answer, each a string or a list of messages."""
    asked: list[dict[str, Any]]
    if isinstance(prompt, str):
        asked = [{"role": "user", "content": prompt}]
    else:
        asked = [as_message(message, i) for i, message in enumerate(as_list(prompt, keys[0]))]
        for message in asked:
            if message["role"] == "assistant":
                message["weight"] = 0
    if isinstance(completion, str):
        return [*asked, {"role": "assistant", "content": _not_empty(completion, keys[1])}]
    return [*asked, *(as_message(message, i) for i, message in enumerate(as_list(completion, keys[1])))]


def _not_empty(text: str, key: str) -> str:
    if not text.strip():
        raise ValueError(f'"{key}" is empty, so there is nothing to learn from')
    return text


LEARNED_ANSWERS = ("all", "last")
NO_COLUMNS: Mapping[str, str] = {}
"""No renamed columns: all have the names of a layout's keys."""


def read_record(
    content: bytes, layout: str, learned_answers: str = "all", columns: Mapping[str, str] = NO_COLUMNS
) -> dict[str, Any] | None:
    """Parses a file or row to {"text"}, {"messages", ...} or {"prompt", "completion"}; None if it is empty.

    Args: as in `read_row` and `record_of`.

    Raises:
      ValueError: bad content. The caller prepends the location to the message.
    """
    row = read_row(content, layout, columns)
    return None if row is None else record_of(row, layout, learned_answers)


def read_row(content: bytes, layout: str | None, columns: Mapping[str, str] = NO_COLUMNS) -> Any:
    """Parses a JSON row, or returns {"text"} for a text file; None if it is blank.

    Args:
      layout: "folder" for the text of a file, or a layout.
      columns: {key of a layout: column}, as in `DataSource`; columns are renamed to these keys.

    Raises:
      ValueError: not UTF-8 text, or not JSON.
    """
    if not content.strip():
        return None
    text = decoded(content)
    return {"text": text} if layout == "folder" else renamed(parsed(text), columns)


def record_of(row: Any, layout: str, learned_answers: str = "all") -> dict[str, Any] | None:
    """Validates a parsed row and converts it to a document; None if its text is blank.

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
    """Parses JSON text, rejecting unpaired surrogates.

    Raises:
      ValueError: the text is not valid JSON or not Unicode. The caller prepends the location.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            # Only JSON's escapes can produce a lone surrogate.
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
    """Decodes a row's bytes as UTF-8.

    Raises:
      ValueError: the bytes are not UTF-8 text. The caller prepends the location.
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


def renamed(row: Any, names: Mapping[str, str]) -> Any:
    """Returns a row with its columns renamed to layout keys; `names` is {key of a layout: column}."""
    if not isinstance(row, dict) or not set(names.values()) & row.keys():
        return row
    others = {column: value for column, value in row.items() if column not in names.values()}
    return others | {key: row[column] for key, column in names.items() if column in row}


def check_columns(names: Mapping[str, str], rows: Iterable[Collection[str]]) -> None:
    """Checks that every column to rename exists in some row. Reads rows until all columns were seen.

    Args:
      names: {key of a layout: column}.
      rows: the columns of each row.

    Raises:
      ValueError: the message names the column and the existing columns. The caller prepends the source.
    """
    missing, found = dict.fromkeys(names.values()), dict[str, None]()
    for row in rows:
        found |= dict.fromkeys(row)
        missing = {column: None for column in missing if column not in row}
        if not missing:
            return
    if found:
        columns = " and no ".join(map(repr, missing))
        raise ValueError(f"no column {columns}; it has {', '.join(found)}")
