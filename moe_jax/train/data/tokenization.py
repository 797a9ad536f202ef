"""A document as tokens, with a mask of the tokens that the model learns to predict, or with their weights."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checkpoint.tokenizer import beginning, begun, ended
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.documents import BAD, Documents
from moe_jax.train.data.hub import Streamed
from moe_jax.train.data.marks import GENERATION_TAG
from moe_jax.train.data.opening import MAX_PROBLEMS


class Tokenized(NamedTuple):
    """A tokenized document, with a mask (or weights) of the tokens to learn.

    Attributes:
      tokens: token ids.
      learned: true for tokens that the model learns to predict. The first token is never predicted. If the data has weights,
        the weight of each token's loss, f32.
      document: the document's index in its data set.
    """

    tokens: Int[np.ndarray, "length"]
    learned: Bool[np.ndarray, "length"] | Float[np.ndarray, "length"]
    document: int


class BadDocument(ValueError):
    """A conversation that the chat template cannot render, or that has no tokens to learn.

    Attributes:
      reason: file, line and cause.
    """

    def __init__(self, place: str, why: str):
        self.reason = f"{place}: {why}"
        super().__init__(f"{self.reason}; --skip-bad-documents skips such conversations, also in a resumed run")


def tokenization(
    documents: Documents, tokenizer: Any, *, begin_texts: bool = True, skipped: dict[int, str] | None = None
) -> Callable[[dict[str, Any]], Tokenized]:
    """Returns a function that tokenizes a document `documents[i]`.

    A text, or a prompt with its continuation, begins with the BOS token if the tokenizer adds one and `begin_texts` is True.
    It ends with the eos token. Neither is added twice. The chat template renders a chat.

    With `skipped`, a conversation that would raise BadDocument gets no tokens instead.
    The reason is stored in `skipped` under the document's index.

    Raises:
      ValueError: the tokenizer has no eos token for text, no template for chat, or gives no character offsets. Also if
        conversations begin with an answer, and the template does not mark answers. The returned function raises BadDocument,
        and ValueError once all documents were read without anything to learn.
    """
    is_chat = documents.is_chat
    if is_chat.any():
        _check_chats(documents, tokenizer, skips=skipped is not None)
    if not is_chat.all() and tokenizer.eos_token_id is None:
        raise ValueError("text data needs a tokenizer with an eos token to end documents with; this one has none")
    # The first call removes the tokenizer's truncation and padding. No other thread may use the tokenizer during that call.
    tokenizer("", add_special_tokens=False)
    chat = partial(_chat, documents, tokenizer)
    chat = chat if skipped is None else partial(_chat_or_nothing, chat, skipped)
    begin = beginning(tokenizer) if begin_texts and not is_chat.all() else []

    def of_kind(record: dict[str, Any]) -> Tokenized:
        # All documents of a stream are of one kind, stored once.
        chats = is_chat[0] if documents.is_stream else is_chat[record["document"]]
        return chat(record) if chats else _text(tokenizer, begin, record)

    told = watch(documents, {} if skipped is None else skipped)

    def tokenized(record: dict[str, Any]) -> Tokenized:
        found = _bad(documents, skipped, record) if BAD in record else of_kind(record)
        told(found.document, bool(found.learned[1:].any()))
        # Packing needs the same dtype for all documents.
        return found._replace(learned=found.learned.astype(np.float32)) if documents.weighted else found

    return tokenized


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns a hash of the tokenizer's vocabulary and rules, eos id and chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    content = "\0".join((rules, str(tokenizer.eos_token_id), str(tokenizer.chat_template)))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _check_chats(documents: Documents, tokenizer: Any, *, skips: bool) -> None:
    documents = documents.surveyed
    if not tokenizer.chat_template:
        raise ValueError(
            "chat data needs a tokenizer with a chat template; this one has none. Give one with --chat-template FILE, a "
            "Jinja file, or --chat-template chatml (in Python chat_template=...)"
        )
    if not tokenizer.is_fast:
        raise ValueError("chat data needs a tokenizer that gives character offsets (a tokenizer.json)")
    # A tokenizer with several templates chooses one per conversation, so `chat_tokens` refuses conversation by conversation.
    several = not isinstance(tokenizer.chat_template, str)
    wrong = np.flatnonzero(documents.begins_with_answer)
    if len(wrong) and not skips and not several and not GENERATION_TAG.search(tokenizer.chat_template):
        more = f"; and {len(wrong) - MAX_PROBLEMS} more" if len(wrong) > MAX_PROBLEMS else ""
        raise ValueError(
            f"{len(wrong)} of {len(documents)} conversations begin with the assistant's message, and this chat template does "
            "not mark answers, so an answer is found by the messages before it; put a system or user message first, or use a "
            "template that marks answers with {% generation %} ... {% endgeneration %}, or leave them out with "
            "--skip-bad-documents: " + "; ".join(documents.where(index) for index in wrong[:MAX_PROBLEMS]) + more
        )


def _text(tokenizer: Any, begin: list[int], record: dict[str, Any]) -> Tokenized:
    """Returns the tokens of {"text"}, all learned, or of {"prompt", "completion"}, where the prompt is not learned."""
    parts = ("", record["text"]) if "text" in record else (record["prompt"], record["completion"])
    given, learned = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in parts)
    whole = begun(begin, given + learned)
    first = 0 if "text" in record else len(whole) - len(learned)
    whole = ended(tokenizer, whole)
    return Tokenized(np.asarray(whole, np.int32), np.arange(len(whole)) >= first, record["document"])


def _chat(documents: Documents, tokenizer: Any, record: dict[str, Any]) -> Tokenized:
    index = record["document"]
    try:
        tokens, learned = chat_tokens(
            tokenizer, record["messages"], record.get("tools"), empty_thinking=documents.empty_thinking
        )
    except ValueError as error:
        raise BadDocument(documents.where(index), str(error)) from error
    if not learned[1:].any():
        raise BadDocument(documents.where(index), "the chat template leaves no token of the assistant to learn from")
    return Tokenized(tokens, learned, index)


def _bad(documents: Documents, skipped: dict[int, str] | None, record: dict[str, Any]) -> Tokenized:
    """Records a bad row of a stream and returns no tokens; raises BadDocument if it may not be skipped."""
    index, reason = record["document"], record[BAD]
    if reason and skipped is None:
        raise BadDocument(documents.where(index), reason)
    if reason and skipped is not None:
        skipped[index] = f"{documents.where(index)}: {reason}"
    return _nothing(index)


def _nothing(index: int) -> Tokenized:
    return Tokenized(np.zeros(0, np.int32), np.zeros(0, bool), index)


def _chat_or_nothing(chat: Callable[[dict[str, Any]], Tokenized], skipped: dict[int, str], record: dict[str, Any]) -> Tokenized:
    if record["document"] in skipped:
        return _nothing(record["document"])
    try:
        return chat(record)
    except BadDocument as error:
        skipped[record["document"]] = error.reason
        return _nothing(record["document"])


MANY_ROWS = 10_000
"""Number of consecutive skipped rows of a stream that triggers a warning: reading a whole stream may take days."""
_logger = logging.getLogger(__name__)


def watch(documents: Documents, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    """Returns told(index, learned), which must be called per document and raises if no document has tokens to learn.

    Args:
      skipped: {document index: reason} of skipped documents.

    Raises:
      ValueError: raised by `told` if all documents, or all rows of a complete pass through a stream, have nothing to learn.
    """
    return _watch_rows(documents, skipped) if isinstance(documents, Streamed) else _watch(documents, skipped)


def _watch(documents: Documents, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    unused: set[int] = set()

    def told(index: int, learned: bool) -> None:
        if not learned:
            unused.add(index)
            if len(unused) == len(documents):
                raise ValueError(_nothing_learned(documents, len(unused), index, skipped))

    return told


def _watch_rows(documents: Streamed, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    # Rows from `since` up to `coming` have nothing to learn. A restored position elsewhere resets both.
    since = coming = 0

    def told(row: int, learned: bool) -> None:
        nonlocal since, coming
        since, coming = since if row == coming else row, row + 1
        if learned:
            since = coming
        elif (whole := documents.rows.last_round) is not None and since <= whole.start and whole.stop <= coming:
            raise ValueError(_nothing_learned(documents, len(whole), whole[-1], skipped))
        elif coming - since == MANY_ROWS:
            _logger.warning("the last %d rows were left out; the last: %s", MANY_ROWS, _why(documents, row, skipped))

    return told


def _nothing_learned(documents: Documents, number: int, last: int, skipped: Mapping[int, str]) -> str:
    names = ", ".join(part.name for part in documents.parts)
    chats = documents.surveyed.is_chat.any()
    other = "a chat template that takes such conversations (--chat-template), or other data" if chats else "other data"
    return (
        f"nothing to learn: all {number:,} documents that were read of {names} are left out; the last: "
        f"{_why(documents, last, skipped)}; give {other}"
    )


def _why(documents: Documents, index: int, skipped: Mapping[int, str]) -> str:
    return skipped.get(index, f"{documents.where(index)}: it has no token to learn")
