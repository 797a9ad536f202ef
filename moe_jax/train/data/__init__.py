"""From documents on disk to an endless, shuffled, resumable stream of packed batches."""

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np

from moe_jax.train.data.documents import Documents, open_documents
from moe_jax.train.data.packing import packed, pieces

__all__ = ["Documents", "batches", "load_tokenizer", "open_documents", "tokenizer_fingerprint"]


def batches(
    documents: Documents, tokenizer, *, seq_len: int, batch_size: int, seed: int = 0
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """An endless iterator of batches: dicts of int32 [batch_size, seq_len], see `packing`. Each epoch has its own order.

    `get_state()` is the position, a tree of JSON values; `set_state` goes back to it exactly, given the same arguments.
    Text documents end with the tokenizer's eos token. Documents are tokenized in a thread of their own, a few ahead.

    Raises:
      ValueError: the tokenizer has no eos token for text, no template for chat, or gives no character offsets; while
        iterating: a conversation that its template cannot render, by file and line.
    """
    if documents.format == "chat":
        if not tokenizer.chat_template:
            raise ValueError("chat data needs a tokenizer with a chat template; this one has none")
        if not tokenizer.is_fast:
            raise ValueError("chat data needs a tokenizer that gives character offsets (a tokenizer.json)")
    elif tokenizer.eos_token_id is None:
        raise ValueError("text data needs a tokenizer with an eos token to end documents with; this one has none")
    stream = grain.MapDataset.source(documents).shuffle(seed=seed).repeat().map(partial(_tokenized, documents, tokenizer))
    stream = stream.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
    stream = grain.experimental.FlatMapIterDataset(stream, _Cut(seq_len))
    return iter(packed(stream, seq_len=seq_len, seed=seed).batch(batch_size, drop_remainder=True))


def load_tokenizer(folder_or_hub_id: str | Path):
    """The Hugging Face tokenizer of a checkpoint."""
    # Without torch, transformers advises on import that models are unavailable; tokenizers are all that is used here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder_or_hub_id))


def tokenizer_fingerprint(tokenizer) -> str:
    """A hash of what the tokenizer does to text and conversations."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    content = "\0".join((rules, str(tokenizer.eos_token_id), str(tokenizer.chat_template)))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Cut(grain.experimental.FlatMapTransform):
    """A tokenized document to its pieces."""

    seq_len: int

    def flat_map(self, element: tuple[np.ndarray, np.ndarray, int]) -> list[dict[str, np.ndarray]]:
        return pieces(*element, self.seq_len)


def _tokenized(documents: Documents, tokenizer, record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens, which are trained on, document)."""
    index = record["document"]
    if documents.format != "chat":
        tokens = tokenizer(record["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray([*tokens, tokenizer.eos_token_id], np.int32), np.ones(len(tokens) + 1, bool), index
    from moe_jax.train.data.chat import chat_tokens

    try:
        tokens, trained = chat_tokens(tokenizer, record["messages"], record.get("tools"))
    except ValueError as error:
        raise ValueError(f"{documents.where(index)}: {error}") from error
    if not trained[1:].any():
        raise ValueError(f"{documents.where(index)}: the chat template leaves no token of the assistant to learn from")
    return tokens, trained, index
