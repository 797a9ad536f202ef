"""Measures of plain English: lines, table cells and sentences of a Markdown page or a docstring that are too long."""

import re
from collections.abc import Iterator

MAX_COLUMNS = 128
MAX_WORDS = 25

_IDIOMS = re.compile(
    r"\b(go(es)? on|went on|stands?|behind (?!a proxy)|says?|said|of which|those of|so many|what it|lies?|beside|is none of"
    r"|whatever|as pasted)\b",
    re.IGNORECASE,
)
"""Translated idioms that a reader has to read twice, such as "stands in" for is in, and "behind" for after."""

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LINK_TARGET = re.compile(r"^\[\w+\]: .*$", re.MULTILINE)
_QUOTE = re.compile(r'"[^"]*"')
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[^a-z]|$)|(?<=[:;])\s+(?=[A-Z])")


def long_lines(page: str) -> Iterator[str]:
    """Yields lines of prose and table cells of more than MAX_COLUMNS characters, without headings, code blocks and links."""
    for line in _FENCE.sub("", page).splitlines():
        if line.startswith("#"):
            continue
        cells = line.strip().strip("|").split(" | ") if line.lstrip().startswith("|") else [line]
        yield from (cell.strip() for cell in cells if len(_LINK.sub(r"\1", cell).strip()) > MAX_COLUMNS)


def long_sentences(page: str) -> Iterator[str]:
    """Yields sentences of more than MAX_WORDS words. A code span is one word. A colon before a capital ends a sentence."""
    for block in blocks(page):
        text = _LINK.sub(r"\1", _CODE.sub("CODE", block))
        for sentence in _SENTENCE_END.split(" ".join(text.split())):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MAX_WORDS:
                yield sentence


def idioms(page: str) -> Iterator[str]:
    """Yields sentences with a translated idiom, outside headings, code and quotes."""
    for block in blocks(page):
        yield from idioms_of_text(block)


def idioms_of_text(text: str) -> Iterator[str]:
    """Yields sentences of a docstring, comment or paragraph with a translated idiom, outside code and quotes."""
    text = _QUOTE.sub("QUOTE", _LINK.sub(r"\1", _CODE.sub("CODE", text)))
    yield from (sentence for sentence in _SENTENCE_END.split(" ".join(text.split())) if _IDIOMS.search(sentence))


def blocks(page: str) -> Iterator[str]:
    """Yields paragraphs, list items and table cells of a page, without code blocks and headings."""
    paragraph: list[str] = []
    for line in [*_LINK_TARGET.sub("", _FENCE.sub("", page)).splitlines(), ""]:
        stripped = line.strip()
        starts_item = bool(re.match(r"([-*]|\d+\.) ", stripped))
        if not stripped or stripped.startswith(("#", "|", "!!!")) or starts_item or line.startswith("    "):
            if paragraph:
                yield " ".join(paragraph)
            paragraph = []
        if stripped.startswith("|"):
            yield from (cell.strip() for cell in stripped.strip("|").split(" | "))
        elif stripped and not stripped.startswith(("#", "!!!")) and not line.startswith("    "):
            paragraph.append(stripped)
