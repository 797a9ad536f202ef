"""Endless, shuffled, resumable batches of packed preference data, each answer a segment of a row.

    tokens        p p c c c p p r r q q d q q s _      one row: prompt p with the answers c and r, prompt q with d and s
    segment_ids   1 1 1 1 1 2 2 2 2 3 3 3 4 4 4 0      pair k has the segments 2 k + 1 (chosen) and 2 k + 2 (rejected)
    loss_mask     0 1 1 1 0 0 1 1 0 0 1 0 0 1 0 0      prompts are masked
    example       [7, 4, -1]                           the pairs' indices in the data; -1: no more pairs in this row

A batch of single answers (KTO) has example k in segment k + 1, and an array "desirable" like "example". The arrays "kl_tokens",
"kl_labels", ... hold the same prompts, each with an answer to another prompt, in the same segments.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checkpoint.tokenizer import beginning, begun, ended
from moe_jax.preferences.documents import Judged, Messages, Preferences
from moe_jax.train.batch import BATCH_ARRAYS
from moe_jax.train.data.chat import chat_tokens

KL = "kl_"
"""Prefix of the names of arrays with mismatched answers."""
MAX_EXAMPLES = 16
"""Maximum number of examples in a row; short examples may leave the rest of the row empty."""
MAX_STEPS_BACK = 100
"""An answer to another prompt is searched for among this many preceding records."""


class Text(NamedTuple):
    """A tokenized prompt and answer, with a mask of the answer's tokens."""

    tokens: Int[np.ndarray, "length"]
    learned: Bool[np.ndarray, "length"]
    """True for the answer's tokens."""


class Example(NamedTuple):
    """A tokenized preference record.

    Attributes:
      number: the record's index in its data.
      texts: the prompt with the chosen and with the rejected answer, or with the single answer.
      mismatched: the prompt with an answer to another prompt, for single answers.
      desirable: True if a single answer is desirable.
    """

    number: int
    texts: tuple[Text, ...]
    mismatched: Text | None = None
    desirable: bool | None = None


Made = tuple[dict[str, np.ndarray], int, set[int]]


def preference_batches(
    preferences: Preferences,
    tokenizer: Any,
    *,
    seq_len: int,
    batch_size: int,
    max_length: int | None = None,
    seed: int | None = 0,
    reference: Float[np.ndarray, "examples 2"] | None = None,
) -> "PreferenceBatches":
    """Returns an endless iterator of batches, as drawn above. Each epoch has its own order.

    Examples are put into the first of `batch_size` rows that has room. The first example without room begins the next batch.
    A thread prepares the next batch while a step computes.

    Args:
      seq_len: tokens of a row. A row holds whole pairs: both texts of each.
      max_length: tokens of a text, prompt and answer; longer texts are cut at their end. Default: the longest that fits in a
        row. Examples whose prompt leaves no token of an answer, and pairs that the cut makes equal, are left out, and counted
        in `skipped`.
      seed: decides the order. None: the data's own.
      reference: the reference's log-probabilities of all examples (`reference_table`); batches then have
        "reference_log_probs".

    Raises:
      ValueError: texts of `max_length` do not fit into a row. While iterating: every example was left out, or messages that
        the chat template cannot render.
    """
    texts = 2 if preferences.of_pairs else 1
    max_length = seq_len // texts if max_length is None else max_length
    if max_length < 2 or texts * max_length > seq_len:
        raise ValueError(
            f"max_length={max_length} must be from 2 to {seq_len // texts}: a row of seq_len={seq_len} tokens holds "
            f"{'both texts of a pair' if texts == 2 else 'a whole text'}"
        )
    return PreferenceBatches(preferences, tokenizer, (batch_size, seq_len, max_length), seed, reference)


class PreferenceBatches(Iterator[dict[str, np.ndarray]]):
    """The iterator that `preference_batches` returns.

    Attributes:
      position: the number of examples so far, including skipped ones; exceeds the data's length in later epochs.
      skipped: the examples that were left out so far.
    """

    def __init__(
        self,
        preferences: Preferences,
        tokenizer: Any,
        sizes: tuple[int, int, int],
        seed: int | None,
        reference: np.ndarray | None,
    ):
        self.preferences, self.seed, self.reference = preferences, seed, reference
        self.rows, self.seq_len, self.max_length = sizes
        self.position, self.skipped = 0, set[int]()
        self._tokens = example_tokens(preferences, tokenizer, self.max_length)
        self._order: tuple[int, np.ndarray] = -1, np.zeros(0, int)
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="preferences")
        self._next: Future[Made] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        upcoming = self._next or self._maker.submit(self._made, self.position)
        self._next = None
        batch, self.position, skipped = upcoming.result()
        self.skipped |= skipped
        self._next = self._maker.submit(self._made, self.position)
        return batch

    def get_state(self) -> dict[str, int]:
        """Returns the position, a JSON value."""
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        """Restores a position from `get_state`, for batches with the same arguments."""
        self.position, self._next = state["position"], None

    def close(self) -> None:
        """Ends the thread that prepares batches."""
        self._maker.shutdown(cancel_futures=True)

    def _made(self, position: int) -> Made:
        """Returns the batch at a position, the position after it, and the examples that were left out."""
        rows, skipped = OpenRows(self.rows, self.seq_len, MAX_EXAMPLES), set[int]()
        while True:
            index = self._index(position)
            example = self._tokens(index)
            if example is None:
                skipped.add(index)
                if len(skipped) == len(self.preferences):
                    raise ValueError(
                        f"no prompt leaves room for its answers in max_length={self.max_length} tokens, or both answers are "
                        "equal so far; use a larger one"
                    )
            elif not rows.add(example):
                break
            position += 1
        batch = rows.arrays()
        if self.reference is not None:
            present = batch["example"] >= 0
            batch["reference_log_probs"] = np.where(present[..., None], self.reference[batch["example"]], 0).astype(np.float32)
        return batch, position, skipped

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.preferences))
        if self._order[0] != epoch:
            order = np.arange(len(self.preferences))
            if self.seed is not None:
                order = np.random.default_rng((self.seed, epoch)).permutation(order)
            self._order = epoch, order
        return int(self._order[1][place])


class OpenRows:
    """The rows of a batch while examples are packed into them. All texts of an example share a row.

    Attributes:
      examples: the examples of each row.
    """

    def __init__(self, rows: int, seq_len: int, max_examples: int):
        self.seq_len, self.max_examples = seq_len, max_examples
        self.examples: list[list[Example]] = [[] for _ in range(rows)]

    def add(self, example: Example) -> bool:
        """Adds an example to the first row with enough space; returns False if there is none."""
        for row in self.examples:
            if len(row) < self.max_examples and self._fits([*row, example]):
                row.append(example)
                return True
        return False

    def _fits(self, row: Sequence[Example]) -> bool:
        lengths = sum(len(text.tokens) for example in row for text in example.texts)
        mismatched = sum(len(example.mismatched.tokens) for example in row if example.mismatched)
        return max(lengths, mismatched) <= self.seq_len

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the packed batch: int32 [rows, seq_len], and [rows, max_examples] for "example" and "desirable"."""
        batch = self._of_texts("", lambda example: example.texts)
        shape = len(self.examples), self.max_examples
        batch["example"] = np.full(shape, -1, np.int32)
        single = any(example.desirable is not None for row in self.examples for example in row)
        if single:
            batch |= self._of_texts(KL, lambda example: (example.mismatched,))
            batch["desirable"] = np.zeros(shape, np.int32)
        for i, row in enumerate(self.examples):
            batch["example"][i, : len(row)] = [example.number for example in row]
            if single:
                batch["desirable"][i, : len(row)] = [example.desirable for example in row]
        return batch

    def _of_texts(self, prefix: str, texts_of) -> dict[str, np.ndarray]:
        rows = [row_of_texts([text for example in row for text in texts_of(example)], self.seq_len) for row in self.examples]
        return {prefix + name: np.stack([row[name] for row in rows]) for name in BATCH_ARRAYS}


def row_of_texts(texts: Sequence[Text], seq_len: int) -> dict[str, Int[np.ndarray, " seq"]]:
    """Packs texts into one row of arrays, with text i in segment i + 1."""
    row = {name: np.zeros(seq_len, np.int32) for name in BATCH_ARRAYS}
    start = 0
    for segment, (tokens, learned) in enumerate(texts, start=1):
        inside = slice(start, start + len(tokens))
        row["tokens"][inside] = tokens
        row["labels"][inside] = np.append(tokens[1:], 0)
        row["loss_mask"][inside] = np.append(learned[1:], False)
        row["positions"][inside] = np.arange(len(tokens))
        row["segment_ids"][inside] = segment
        start = inside.stop
    return row


def example_tokens(preferences: Preferences, tokenizer: Any, max_length: int) -> Callable[[int], Example | None]:
    """Returns a function index -> `Example`, or None for a record without anything to learn.

    That is so if the prompt leaves no room for answers, or if both texts of a pair are equal, perhaps after the cut.
    The chat template renders messages, and the learned tokens are the same as in fine-tuning on chats. Plain texts begin with
    the BOS token if the tokenizer adds one, and end with the eos token, unless they already have them. Texts are cut after
    `max_length` tokens.

    Raises:
      ValueError: the tokenizer has no eos token for plain text. The function raises it for messages that the chat template
        cannot render, by file and line.
    """
    begin = beginning(tokenizer)

    def text_of(found: Judged, answer: Any) -> Text:
        if isinstance(found.prompt, str):
            whole = _plain(tokenizer, begin, found.prompt, answer)
        else:
            whole = _chat(tokenizer, found.prompt, answer, found.tools)
        return Text(whole.tokens[:max_length], whole.learned[:max_length])

    def example(index: int) -> Example | None:
        found = preferences[index]
        try:
            texts = tuple(text_of(found, answer) for answer in found.answers)
            other = None if preferences.of_pairs else text_of(found, _answer_to_another(preferences, index, found))
        except ValueError as error:
            raise ValueError(f"{preferences.where(index)}: {error}") from error
        all_texts = texts if other is None else (*texts, other)
        if not all(text.learned[1:].any() for text in all_texts) or (len(texts) == 2 and all(map(np.array_equal, *texts))):
            return None
        return Example(index, texts, other, found.desirable)

    return example


def _answer_to_another(preferences: Preferences, index: int, found: Judged) -> str | Messages:
    """Returns the answer of the nearest record before `index` with another prompt and of the same kind (text or messages)."""
    for back in range(1, min(MAX_STEPS_BACK, len(preferences) - 1) + 1):
        other = preferences[(index - back) % len(preferences)]
        if other.prompt != found.prompt and isinstance(other.prompt, str) == isinstance(found.prompt, str):
            return other.answers[0]
    raise ValueError(f"no other prompt among the {MAX_STEPS_BACK} records before, and KTO's baseline needs an answer to one")


def _chat(tokenizer: Any, prompt: Messages, answer: Messages, tools: list | None) -> Text:
    # Earlier answers belong to the prompt.
    masked = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
    return Text(*chat_tokens(tokenizer, [*masked, *answer], tools))


def _plain(tokenizer: Any, begin: list[int], prompt: str, answer: str) -> Text:
    if tokenizer.eos_token_id is None:
        raise ValueError("plain text needs a tokenizer with an eos token to end answers with; this one has none")
    of_prompt, of_both = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (prompt, prompt + answer)
    )
    # Tokens that cross the end of the prompt belong to the answer.
    differ = (i for i, (a, b) in enumerate(zip(of_prompt, of_both, strict=False)) if a != b)
    whole = begun(begin, of_both)
    shared = len(whole) - len(of_both) + next(differ, min(len(of_prompt), len(of_both)))
    tokens = np.asarray(ended(tokenizer, whole), np.int32)
    return Text(tokens, np.arange(len(tokens)) >= shared)
