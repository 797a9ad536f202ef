"""Training documents on disk: a folder of text files, or JSONL with "text" or "messages" a line, read by index.

All files are read once when they are opened: that finds bad lines before training starts, indexes the documents by byte
offset, and gives a fingerprint that a resumed run compares. After that one document at a time is in memory.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = ("auto", "chat", "text", "folder")
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PROBLEMS = 10
"""An error lists this many bad lines or files, and counts the rest."""
_OR_CHATS = ' (or, in all lines, "messages" for chats)'


@dataclass(frozen=True)
class Documents:
    """A random-access source: `documents[i]` is {"document": i, "text": str} or {"document": i, "messages": [...], ...}.

    Attributes:
      format: "folder", "text" or "chat".
      files: the files, sorted; `file`, `line` (from 1), `offset` and `size` (bytes) say where each document lies.
      fingerprint: a hash of the format and of all files' contents, in order.
    """

    format: str
    files: tuple[Path, ...]
    file: np.ndarray
    line: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self.files[self.file[index]], "rb") as handle:
            handle.seek(self.offset[index])
            content = handle.read(self.size[index])
        if self.format == "folder":
            return {"document": int(index), "text": content.decode()}
        return {**json.loads(content), "document": int(index)}

    def where(self, index: int) -> str:
        """The document's place, for messages: file, line and byte offset."""
        path = self.files[self.file[index]]
        return str(path) if self.format == "folder" else f"{path}:{self.line[index]} (byte {self.offset[index]})"


def open_documents(path: str | Path, data_format: str = "auto") -> Documents:
    """Opens and checks a data set.

    Args:
      path: a folder of UTF-8 text files (searched recursively, hidden ones left out; each file is a document), a .jsonl
        file, or a folder of .jsonl files.
      data_format: "folder", "text" (JSONL with a string "text"), "chat" (JSONL with a list "messages", each with "role" and a
        string "content", or "tool_calls" without one; optionally "tools"), or "auto": by what is there.

    Raises:
      FileNotFoundError: there is no such path, or no file in it.
      ValueError: bad lines or files, listed by file and line; not one document that has any text; or, with "auto", a folder
        of .jsonl files and others.
    """
    path = Path(path).expanduser().resolve()
    if data_format not in FORMATS:
        raise ValueError(f"data_format must be one of {', '.join(FORMATS)}; got {data_format!r}")
    if not path.exists():
        raise FileNotFoundError(f"no data at {path}: give a folder of text files or a .jsonl file")
    files = _files(path, data_format)
    if data_format == "auto":
        data_format = _guess(path, files)
    if data_format == "folder" and path.is_file():
        raise ValueError(f"{path} is a single file and no .jsonl file: give a .jsonl file, or a folder of text files")

    digest, problems = hashlib.blake2b(data_format.encode(), digest_size=16), []
    places: list[tuple[int, int, int, int]] = []
    for i, file in enumerate(files):
        offset = 0
        digest.update(b"\0file\0")
        with open(file, "rb") as handle:
            for line, content in enumerate([handle.read()] if data_format == "folder" else handle, start=1):
                digest.update(content)
                problem = _problem(content, data_format)
                if problem is None:
                    places.append((i, line, offset, len(content)))
                elif problem != "empty":
                    problems.append(f"{file}: {problem}" if data_format == "folder" else f"{file}:{line}: {problem}")
                offset += len(content)
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise ValueError(f"bad training data ({data_format}): " + "; ".join(problems[:MAX_PROBLEMS]) + more)
    if not places:
        raise ValueError(f"no document with any text in {path} ({len(files)} files)")
    columns = np.asarray(places, np.int64).T
    return Documents(data_format, tuple(files), columns[0], columns[1], columns[2], columns[3], digest.hexdigest())


def _files(path: Path, data_format: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(
        p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    if data_format in ("chat", "text"):
        found = [p for p in found if p.suffix == ".jsonl"]
    if not found:
        raise FileNotFoundError(f"no {'.jsonl ' if data_format in ('chat', 'text') else ''}files in the folder {path}")
    return found


def _guess(path: Path, files: list[Path]) -> str:
    """ "folder" if no file is .jsonl; if all are, by the first line."""
    others = [file for file in files if file.suffix != ".jsonl"]
    if len(others) == len(files):
        return "folder"
    if others:
        raise ValueError(
            f"{path} holds .jsonl files and others, such as {others[0].name}: say which are meant, with data_format chat or "
            "text the .jsonl files alone, with folder all files as they are"
        )
    with open(files[0], "rb") as handle:
        first = next((line for line in handle if line.strip()), b"")
    try:
        return "chat" if "messages" in json.loads(first) else "text"
    except (ValueError, TypeError):
        return "text"


def _problem(content: bytes, data_format: str) -> str | None:
    """What is wrong with a file's or line's content; "empty" for nothing to learn from; None if it is fine."""
    if not content.strip():
        return "empty"
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    if data_format == "folder":
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    if "\\u" in text and (half := _half_a_character(record)):
        return f"not valid Unicode: the escape {half} alone is half of a character"
    key = "text" if data_format == "text" else "messages"
    if not isinstance(record, dict) or key not in record:
        keys = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        return f'needs an object with the key "{key}"{_OR_CHATS if key == "text" else ""}; it has {keys}'
    if data_format == "chat":
        return _chat_problem(record["messages"])
    if not isinstance(record["text"], str):
        return f'"text" must be a string; it is a {type(record["text"]).__name__}'
    return None if record["text"].strip() else "empty"


def _half_a_character(record: Any) -> str | None:
    """The first surrogate without its other half, as JSON's escape, which alone can write one; None if there is none."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def _chat_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return '"messages" must be a list of objects'
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            return f"message {i} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}"
        content = message.get("content")
        if isinstance(content, list):
            return f'message {i} ({message["role"]}) has "content" in parts; join the texts of its parts into one string'
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f'message {i} ({message["role"]}) needs a string "content"'
    if not any(message["role"] == "assistant" for message in messages):
        return "no assistant message, so there is nothing to learn from"
    return None
