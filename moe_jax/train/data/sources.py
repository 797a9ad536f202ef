"""The sources of a data set as a user names them: a file, a folder or a hub id, with options behind commas."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_jax.train.data.files import FORMATS, is_table_or_lines
from moe_jax.train.data.layouts import KEYS

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class DataSource:
    """A part of the data.

    Attributes:
      path: a file, a folder, or the id of a data set of the hub.
      weight: its share of the documents that are learned, beside the other sources' weights; None: its share of all documents.
      format: as `data_format`; None: the format of all sources.
      split, config, revision: of a data set of the hub; None: the split "train", its only config, its newest revision.
      columns: {key of a layout: the column that has it}, for rows that have their own names.
      take: the first rows of a data set of the hub, which are read as a stream; None: all rows.
      stream: read the rows of a data set of the hub as they come, in their order, instead of downloading all of them first.
    """

    path: str
    weight: float | None = None
    format: str | None = None
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    take: int | None = None
    stream: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_hub(self) -> bool:
        """Tells a hub id by its form, if there is no such path here."""
        path = Path(self.path).expanduser()
        return bool(HUB_ID.fullmatch(self.path)) and not path.exists() and not is_table_or_lines(path)


def sources(data: str | Path | Sequence[str | Path]) -> list[DataSource]:
    """Reads sources such as `chats.jsonl`, `chats.jsonl,weight=0.7` or `owner/name,split=train,take=1000`.

    A path that exists is taken as it is, commas included.

    Raises:
      ValueError: an unknown option or a wrong value. Some sources have a weight, and others none. Or a stream is not the only
        source, or has `take`.
    """
    found = [_source(str(text)) for text in ([data] if isinstance(data, str | Path) else data)]
    if not found:
        raise ValueError("no data: give a file, a folder or the id of a data set of the hub")
    stream = next((source for source in found if source.stream), None)
    if stream is not None and (len(found) > 1 or stream.take is not None):
        beside = f"take={stream.take}" if stream.take is not None else "other sources"
        raise ValueError(
            f"{stream.path},stream=true reads all rows in their order, and cannot stand beside {beside}: leave one of both "
            "out; take=N alone reads the first N rows as a stream, and these can be mixed"
        )
    weighted = [source for source in found if source.weight is not None]
    if weighted and (len(found) == 1 or len(weighted) < len(found)):
        without = next((source.path for source in found if source.weight is None), None)
        raise ValueError(
            f"{found[0].path} is the only source, so its weight says nothing; leave it out"
            if without is None
            else f"{without} has no weight, and {weighted[0].path} has one; give all sources a weight, or none"
        )
    return found


def _source(text: str) -> DataSource:
    if Path(text).expanduser().exists():
        return DataSource(text)
    path, *options = text.split(",")
    known = [each.name for each in fields(DataSource) if each.name not in ("path", "columns")]
    values: dict[str, Any] = {}
    columns: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in (*known, *KEYS) or not equals or not value or name in values or name in columns:
            raise ValueError(
                f"data {text!r}: {option!r} is no option; options are {', '.join(f'{name}=...' for name in known)}, and keys "
                "of layouts such as prompt=COLUMN, each once"
            )
        if name in known:
            values[name] = _value(text, name, value)
        else:
            columns[name] = value
    source = DataSource(path, **values, columns=columns)
    if source.format is not None and source.format not in FORMATS:
        raise ValueError(f"data {text!r}: format must be one of {', '.join(FORMATS)}; got {source.format!r}")
    given = [name for name in ("split", "config", "revision", "take", "stream") if name in values]
    if given and not source.on_hub:
        raise ValueError(f"data {text!r}: {given[0]} is for data sets of the hub, and {path!r} is no id such as owner/name")
    return source


def _value(text: str, name: str, value: str) -> str | float | int | bool:
    if name == "stream":
        if value != "true":
            raise ValueError(f"data {text!r}: stream must be true, or left out; got {value!r}")
        return True
    if name not in ("weight", "take"):
        return value
    try:
        number = int(value) if name == "take" else float(value)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        what = "a number greater than 0" if name == "weight" else "an integer of at least 1"
        raise ValueError(f"data {text!r}: {name} must be {what}; got {value!r}")
    return number
