"""A look at a data set as a model learns it: numbers, and the first documents with the learned tokens marked."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.train.data.description import MASKING_BLOCKS, describe_sources, keeping_reasoning, kind_of
from moe_jax.train.data.documents import Documents
from moe_jax.train.data.survey import Survey, survey
from moe_jax.train.data.tokenization import BadDocument, tokenization

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
    seed: int = 0,
    skip_bad: bool = False,
    shown: int = 3,
    marks: Marks = PLAIN,
) -> Iterator[str]:
    """Yields the lines of a report: sources, a table of numbers of all documents, and the first `shown` of each source.

    Raises:
      ValueError: the tokenizer or a document is refused, as in `batches`.
    """
    if documents.is_stream:
        yield f"the first rows of a stream: {documents.parts[0].name}"
    documents = documents.surveyed
    found = survey(documents, tokenizer, seq_len=seq_len, seed=seed, skip_bad=skip_bad, max_documents=None, max_seconds=None)
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
    """Returns the text of tokens, with learned text between `marks`, and its weight in front if that is not 1."""
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
