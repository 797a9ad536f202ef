"""A file of JSON that is no JSON Lines: a list of objects, or objects one after the other."""

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from moe_jax.train.data.rows import OnDisk, RawRow, mark_of


class JsonFile(OnDisk):
    """A JSON list of objects, or objects one after the other, on any number of lines."""

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the objects.

        Raises:
          ValueError: the file is no UTF-8 text, or is broken; then nothing tells where the next object begins.
        """
        whole = self.path.read_bytes()
        digest.update(whole)
        try:
            text = whole[mark_of(whole) :].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
        is_list = text.lstrip()[:1] == "["
        place, decoder = _Place(text, 1, 0, mark_of(whole)), json.JSONDecoder()
        place = place.moved_to(text.index("[") + 1 if is_list else 0)
        while True:
            place = place.moved_to(_after_blanks(text, place.character, "," if is_list else ""))
            if place.character == len(text) or (is_list and text[place.character] == "]"):
                break
            try:
                end = decoder.raw_decode(text, place.character)[1]
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else "a number or a nesting that is too large"
                raise ValueError(f"{self.path}:{place.line}: not JSON, so the rest cannot be read: {why}") from error
            content = text[place.character : end].encode(errors="surrogatepass")
            yield RawRow(place.line, place.byte, len(content), content)
            place = place.moved_to(end)
        if is_list and place.character == len(text):
            raise ValueError(f"{self.path}:{place.line}: the list has no end, so the file was cut; write it again")


class _Place(NamedTuple):
    """A character of `text`, with its line and its byte in the file."""

    text: str
    line: int
    character: int
    byte: int

    def moved_to(self, character: int) -> "_Place":
        passed = self.text[self.character : character]
        size = len(passed) if passed.isascii() else len(passed.encode(errors="surrogatepass"))
        return _Place(self.text, self.line + passed.count("\n"), character, self.byte + size)


def _after_blanks(text: str, start: int, comma: str) -> int:
    """Returns the place of the next character that is neither white space nor `comma`."""
    while start < len(text) and (text[start].isspace() or text[start] == comma):
        start += 1
    return start
