"""Measures a data set before training: tokens, the learned share, cuts, and the rows that it fills."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from moe_jax.train.data.chat import answers_without_reasoning, chat_tokens, has_reasoning
from moe_jax.train.data.documents import Documents
from moe_jax.train.data.mixing import epoch
from moe_jax.train.data.packing import PACKING_ROWS, pieces
from moe_jax.train.data.tokenization import Tokenized, tokenization
from moe_jax.train.data.turns import of_last_turn


@dataclass(frozen=True)
class Survey:
    """Statistics of one epoch: each document once, or the first epoch of weighted sources.

    They are estimates unless all documents were measured.

    Attributes:
      documents: how many the data set has.
      measured: how many of them were tokenized.
      tokens: tokens in rows.
      learned: the share of them that the model learns to predict.
      cut: documents longer than a row, which are cut.
      answers: answers of the assistant; 0 for texts.
      answers_cut: answers that extend past the first row of their conversation: learned without the text before the cut.
      skipped: conversations that are skipped because the chat template refuses them.
      rows: rows that are filled.
      padding: the share of a row's places that hold no token.
      bad: rows or files that were left out when the data was opened.
      dropped: tokens in skipped pieces of cut documents, without anything to learn.
      of_source: tokens of an epoch by source.
      without_reasoning: learned answers whose reasoning the chat template leaves out.
      of_last_turns: how many of them are in a conversation's last turn.
      empty_thinking: learned answers that begin with an empty think block, which is learned.
      mean_weight: the mean weight of learned tokens.
    """

    documents: int
    measured: int
    tokens: int
    learned: float
    cut: int
    answers: int
    answers_cut: int
    skipped: int
    rows: float
    padding: float
    bad: int = 0
    dropped: int = 0
    of_source: tuple[int, ...] = ()
    without_reasoning: int = 0
    of_last_turns: int = 0
    empty_thinking: int = 0
    mean_weight: float = 1.0

    @property
    def exact(self) -> bool:
        """True if all documents were measured."""
        return self.measured == self.documents

    def epochs(self, steps: int, batch_size: int) -> float:
        """Returns how many epochs `steps` steps of `batch_size` rows take."""
        return steps * batch_size / self.rows

    def steps(self, epochs: float, batch_size: int) -> int:
        """Returns the smallest number of steps, at least 1, that covers `epochs` epochs."""
        return max(1, math.ceil(epochs * self.rows / batch_size - 1e-9))


def survey(
    documents: Documents,
    tokenizer: Any,
    *,
    seq_len: int,
    seed: int = 0,
    begin_texts: bool = True,
    skip_bad: bool = False,
    max_documents: int | None = 2000,
    max_seconds: float | None = 5.0,
) -> Survey:
    """Tokenizes documents drawn by `seed` and extrapolates to an epoch; without limits, measures all documents.

    For a stream it measures documents of the first rows. It exceeds the limits if needed to include a document that is not
    skipped.

    Args:
      seq_len: tokens in a row.
      begin_texts, skip_bad: as in `batches`.
      max_documents: how many to tokenize at most.
      max_seconds: after this time no more documents are started.

    Raises:
      ValueError: the tokenizer or a document is refused, as in `batches`.
    """
    documents, skipped = documents.surveyed, dict[int, str]()
    tokenized = tokenization(documents, tokenizer, begin_texts=begin_texts, skipped=skipped if skip_bad else None)
    whole = epoch(documents, seed)
    order = whole[np.random.default_rng(seed).permutation(len(whole))]
    lengths: list[int] = []
    is_chat, of_source = documents.is_chat, [0] * len(documents.parts)
    source = np.repeat(np.arange(len(of_source)), [part.documents for part in documents.parts])
    learned = dropped = cut = answers = answers_cut = measured = measured_bytes = 0
    weight, thinking = 0.0, np.zeros(3)
    for record, document in _measured(documents, tokenized, order, max_documents, max_seconds):
        tokens, trained, index = document
        measured, measured_bytes = measured + 1, measured_bytes + int(documents.size[index])
        before = len(lengths)
        for piece in pieces(document, seq_len):
            lengths.append(len(piece["tokens"]))
            learned += int((piece["loss_mask"] != 0).sum())
            weight += float(piece["loss_mask"].sum(dtype=np.float64))
        in_rows = sum(lengths[before:])
        of_source[source[index]] += in_rows
        dropped += len(tokens) - in_rows
        cut += len(tokens) > seq_len
        if is_chat[index]:
            ends = np.flatnonzero(np.diff((trained != 0).astype(np.int8), append=0) == -1)
            if len(tokens):
                thinking += _thinking(tokenizer, record, document)
            answers, answers_cut = answers + len(ends), answers_cut + int((ends >= seq_len).sum())
    if not lengths:
        why = "".join(f"; one of them is left out: {reason}" for reason in list(skipped.values())[:1])
        raise ValueError(f"none of {measured:,} documents of an epoch has a token to learn{why}")
    # Documents differ in length, so the sample's share of bytes estimates the whole better than its share of documents.
    by_bytes, by_documents = float(documents.size[whole].sum()) / measured_bytes, len(documents) / measured
    without_reasoning, of_last_turns, empty_thinking = (round(number * by_documents) for number in thinking)
    padding = _padding(lengths, seq_len)
    return Survey(
        documents=len(documents),
        measured=measured,
        tokens=round(sum(lengths) * by_bytes),
        learned=learned / sum(lengths),
        cut=round(cut * by_documents),
        answers=round(answers * by_documents),
        answers_cut=round(answers_cut * by_documents),
        skipped=round(len(skipped) * by_documents),
        rows=sum(lengths) * by_bytes / (seq_len * (1 - padding)),
        padding=padding,
        bad=documents.num_bad,
        dropped=round(dropped * by_bytes),
        without_reasoning=without_reasoning,
        of_last_turns=of_last_turns,
        empty_thinking=empty_thinking,
        mean_weight=weight / learned,
        of_source=tuple(round(tokens * by_bytes) for tokens in of_source),
    )


def _measured(
    documents: Documents,
    tokenized: Callable[[dict[str, Any]], Tokenized],
    order: np.ndarray,
    max_documents: int | None,
    max_seconds: float | None,
) -> Iterator[tuple[dict[str, Any], Tokenized]]:
    """Yields records with their tokens in this order up to the limits, or later until one has a token to learn."""
    began, found = time.monotonic(), False
    number = len(order) if max_documents is None else min(max_documents, len(order))
    counted = tqdm(order, total=number, desc="counting tokens", unit=" documents", delay=2, leave=False, disable=None)
    for count, index in enumerate(counted, start=1):
        record = documents[int(index)]
        document = tokenized(record)
        yield record, document
        found |= bool(document.learned[1:].any())
        if found and (count >= number or (max_seconds is not None and time.monotonic() - began > max_seconds)):
            return


def _thinking(tokenizer: Any, record: dict[str, Any], document: Tokenized) -> list[int]:
    """Counts a chat's answers without their reasoning, such answers in its last turn, and learned empty think blocks."""
    messages, tools = record["messages"], record.get("tools")
    left_out = answers_without_reasoning(tokenizer, messages, tools) if has_reasoning(messages) else []
    last = of_last_turn(messages)
    of_last = [i for i in left_out if last[i].get("weight", 1)]
    blocks = 0
    if "</think>" in tokenizer.decode(document.tokens):
        _, others = chat_tokens(tokenizer, messages, tools, empty_thinking="mask")
        blocks = int((np.diff((others != document.learned).astype(np.int8), prepend=0) == 1).sum())
    return [len(left_out), len(of_last), blocks]


def _padding(lengths: list[int], seq_len: int) -> float:
    """Simulates `packed` over at most a million pieces; returns the share of padding."""
    filled, rows, room = 0, 0, [seq_len] * PACKING_ROWS
    # Few pieces are repeated, as in training. Otherwise the unfinished last rows would count as padding.
    for i in range(max(min(len(lengths), 10**6), 50 * PACKING_ROWS)):
        length = lengths[i % len(lengths)]
        bin_ = next((number for number, left in enumerate(room) if left >= length), None)
        if bin_ is None:
            filled, rows = filled + PACKING_ROWS * seq_len - sum(room), rows + PACKING_ROWS
            bin_, room = 0, [seq_len] * PACKING_ROWS
        room[bin_] -= length
    return 1 - filled / (rows * seq_len) if rows else 0.0
