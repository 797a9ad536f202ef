"""Describes a data set in lines for people: its sources, numbers, and the first documents with the learned tokens marked."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.train.data.documents import Documents, SourcePart
from moe_jax.train.data.mixing import places_of_sources
from moe_jax.train.data.survey import Survey, survey
from moe_jax.train.data.tokenization import BadDocument, tokenization
from moe_jax.train.data.turns import OF_MESSAGES

UNNAMED = {("chat",), ("text",), ("folder",)}
"""Layouts that are not mentioned in the report."""
MASKING_BLOCKS = "--empty-thinking mask leaves the block out of the loss"


def describe_sources(documents: Documents, found: Survey | None = None, template: Any = None) -> list[str]:
    """Returns lines of text about sources (weights, layouts, unused keys) and skipped rows.

    With several sources each has a line. Keys of messages that the chat template mentions count as used.
    """
    parts = [part._replace(unread=_unread(part, str(template))) for part in documents.parts]
    weighted = documents.parts[0].weight is not None
    places = places_of_sources(documents) if weighted else [part.documents for part in documents.parts]
    lines = [
        _source(part, places[number], documents, None if found is None else found.of_source[number])
        for number, part in enumerate(parts)
        if len(parts) > 1 or part.layouts not in UNNAMED or part.unread
    ]
    if documents.num_bad:
        lines.append(f"{_of(documents.num_bad, 'bad row')} left out: {documents.bad}")
    return lines


def describe_tokens(documents: Documents, found: Survey, seq_len: int) -> list[str]:
    """Returns lines of text about tokens: the learned share, padding, skipped and cut documents."""
    about = "" if found.exact else "about "
    kind = kind_of(documents)
    weight = f" (mean weight {found.mean_weight:.3g})" if found.mean_weight != 1 else ""
    first, stream = ("the first ", " of a stream") if documents.is_stream else ("", "")
    sample = "" if found.exact else f" (measured on {found.measured:,} of them)"
    learned = f"{found.learned:.0%} of them learned{weight}"
    lines = [
        f"{first}{found.documents:,} {kind}{stream}{sample}: {about}{found.tokens:,} tokens, {learned}; rows of "
        f"{seq_len} tokens with {found.padding:.0%} padding"
    ]
    if found.skipped:
        lines.append(f"{about}{found.skipped:,} of {found.documents:,} {kind} are left out: the chat template refuses them")
    if found.without_reasoning:
        lines.append(
            f"{about}{found.without_reasoning:,} of {found.answers:,} answers are learned without their reasoning, which the "
            f"chat template leaves out: {keeping_reasoning(found)}"
        )
    if found.empty_thinking:
        lines.append(
            f"{about}{found.empty_thinking:,} of {found.answers:,} answers are learned with the empty think block that they "
            f"begin with: {MASKING_BLOCKS}"
        )
    if not found.cut:
        return lines
    line = f"{about}{found.cut:,} of {found.documents:,} {kind} are longer than a row and are cut"
    if found.answers_cut:
        line += (
            f"; {about}{found.answers_cut:,} of {found.answers:,} answers reach beyond the first cut, and are learned without "
            "what stood before it: a larger --seq-len keeps them whole"
        )
    return [*lines, line]


def keeping_reasoning(found: Survey) -> str:
    """Returns a text that names the options with which no answer is learned without its reasoning."""
    marked = "a template that keeps it (--chat-template, docs/data.md) learns it"
    return marked if found.of_last_turns else f"--learned-answers last learns last turns alone; {marked}"


def kind_of(documents: Documents) -> str:
    """Returns "conversations" for chat data, else "documents"."""
    return "conversations" if documents.format == "chat" else "documents"


def _unread(part: SourcePart, template: str) -> tuple[str, ...]:
    return tuple(key for key in part.unread if not (key.startswith(OF_MESSAGES) and key.removeprefix(OF_MESSAGES) in template))


def _source(part: SourcePart, places: int, documents: Documents, tokens: int | None) -> str:
    line = f"{part.name}: {', '.join(part.layouts)}, {_of(part.documents, 'document')}"
    if part.weight is not None:
        line += (
            f", weight {part.weight:g}: {places:,} of {len(documents):,} in an epoch, each {places / part.documents:.3g} times"
        )
    if tokens is not None and len(documents.parts) > 1:
        line += f", {tokens:,} tokens"
    return line + (f"; keys that are not read: {', '.join(part.unread)}" if part.unread else "")


def _of(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


Marks = tuple[str, str]
"""The texts before and after learned text."""
PLAIN = "[[", "]]"
COLORED = "\033[32m", "\033[0m"
"""Green on a terminal."""


def report(
    documents: Documents,
    tokenizer: Any,
    *,
    seq_len: int,
    skip_bad: bool = False,
    shown: int = 3,
    marks: Marks = PLAIN,
) -> Iterator[str]:
    """Yields the lines of a report: sources, a table of counts for all documents, and the first `shown` documents of each
    source.

    Raises:
      ValueError: the tokenizer or a document is refused, as in `batches`.
    """
    if documents.is_stream:
        yield f"the first rows of a stream: {documents.parts[0].name}"
    documents = documents.surveyed
    found = survey(documents, tokenizer, seq_len=seq_len, skip_bad=skip_bad, max_documents=None, max_seconds=None)
    yield from describe_sources(documents, found, tokenizer.chat_template)
    width = 26
    for name, value in _numbers(documents, found, seq_len):
        yield f"{name:<{width}}{value}"
    first = 0
    for part in documents.parts:
        for index in range(first, first + min(shown, part.documents)):
            yield ""
            yield from _shown(documents, tokenizer, index, marks)
        first += part.documents


def marked(
    tokenizer: Any,
    tokens: Int[np.ndarray, "length"],
    learned: Bool[np.ndarray, "length"] | Float[np.ndarray, "length"],
    marks: Marks,
) -> str:
    """Decodes tokens, with learned spans between `marks`, prefixed by their weight if it is not 1."""
    text = ""
    for weight, places in itertools.groupby(range(len(tokens)), key=lambda i: float(learned[i])):
        said = tokenizer.decode([int(tokens[i]) for i in places], skip_special_tokens=False)
        shown = "" if weight == 1 else f"{weight:g} x "
        text += f"{marks[0]}{shown}{said}{marks[1]}" if weight else said
    return text


def _numbers(documents: Documents, found: Survey, seq_len: int) -> list[tuple[str, str]]:
    learned = round(found.tokens * found.learned)
    numbers = [(kind_of(documents), f"{found.documents:,}")]
    if found.bad:
        numbers.append(("bad rows left out", f"{found.bad:,}"))
    if found.skipped:
        numbers.append(("refused by the template", f"{found.skipped:,}, which are left out"))
    numbers += [
        ("tokens", f"{found.tokens:,}"),
        ("learned", f"{learned:,} ({found.learned:.1%})"),
        *([("weight of learned", f"{learned * found.mean_weight:,.6g}")] if documents.weighted else []),
        ("masked", f"{found.tokens - learned:,}"),
        (f"rows of {seq_len}", f"{_rows(found.rows)} ({1 - found.padding:.1%} filled)"),
        ("documents that are cut", f"{found.cut:,}"),
        ("tokens dropped by cuts", f"{found.dropped:,}"),
    ]
    if found.answers:
        numbers.append(("answers", f"{found.answers:,}"))
        numbers.append(("answers behind a cut", f"{found.answers_cut:,}"))
    if found.without_reasoning:
        numbers.append(("without their reasoning", f"{found.without_reasoning:,} ({keeping_reasoning(found)})"))
    if found.empty_thinking:
        numbers.append(("empty think blocks", f"{found.empty_thinking:,} ({MASKING_BLOCKS})"))
    return numbers


def _rows(rows: float) -> str:
    return f"{rows:,.1f}" if rows >= 0.1 else "less than 0.1"


def _shown(documents: Documents, tokenizer: Any, index: int, marks: Marks) -> Iterator[str]:
    try:
        tokens, learned, _ = tokenization(documents, tokenizer)(documents[index])
    except BadDocument as error:
        yield f"--- left out: {error.reason}"
        return
    # The first token is never predicted.
    learned = learned * (np.arange(len(tokens)) > 0)
    yield f"--- {documents.where(index)}: {len(tokens)} tokens, {int((learned != 0).sum())} learned"
    yield marked(tokenizer, tokens, learned, marks)
