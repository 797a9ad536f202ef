"""Turns tokens into text as they come: complete characters alone, and nothing of what could begin a stop text."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character, or not yet."""

CONTEXT = 4
"""Number of tokens before the new ones that are decoded with them.

Some tokenizers drop the space before a text's first token. A character has at most 4 bytes, and a token at least one.
"""

MAX_WINDOW = 16
"""Number of decoded tokens above which all but `CONTEXT` of them are dropped."""


KEPT = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace", "Sequence", "Split"}
"""Steps of a tokenizer before its merges that drop no byte, unless `_drops` finds one. NFC may write characters in fewer."""

MOST_SHRUNK = 4
"""Bytes of characters for each byte of their NFC form, rounded up: seven of a Greek iota with two marks become two."""


class _Kinds(NamedTuple):
    special: frozenset[int]
    """Tokens without text, such as those that end a message."""
    bytes: frozenset[int]
    """Tokens that stand for one byte each, as sentencepiece has them for characters outside its vocabulary."""
    known: frozenset[int]
    """All tokens; a model's vocabulary may be larger."""


class TextStream:
    """The text of one sequence behind its prompt, without special tokens, cut where a stop text begins.

    All pieces together are the text that the tokenizer decodes from the whole, without its clean-up of spaces. Each token costs
    the decoding of at most `MAX_WINDOW` tokens, but for tokens that are single bytes: these are decoded once, where they end.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: Sequence[int] = (), stop: Iterable[str] = ()):
        self._tokenizer = tokenizer
        self._kinds = _kinds_of_tokens(tokenizer)
        self._stop = StopSearch(stop)
        self._window = self._end_of(prompt_tokens)
        self._given = len(self._stable(self._decoded()))
        """Number of the window's characters that are in the prompt, or were returned."""

    @property
    def stopped(self) -> bool:
        """True once a stop text was found; all later text is dropped."""
        return self._stop.found

    def add(self, token: int) -> str:
        """Returns the text that the next token completes: often all of its own, sometimes none."""
        if self.stopped or not self._shows(token):
            return ""
        self._window.append(token)
        # A later byte can make a whole run of byte tokens invalid, or valid again.
        if token in self._kinds.bytes:
            return ""
        text = self._decoded()
        end = max(len(self._stable(text)), self._given)
        new, self._given = text[self._given : end], end
        if len(self._window) > MAX_WINDOW:
            held = len(text) - end
            del self._window[:-CONTEXT]
            self._given = len(self._decoded()) - held
        return self._stop.add(new)

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        if self.stopped:
            return ""
        text = self._decoded()
        new, self._given = text[self._given :], len(text)
        return self._stop.add(new) + self._stop.flush()

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _stable(self, text: str) -> str:
        """Returns the text without a last character that later bytes may complete."""
        return text.removesuffix(REPLACEMENT)

    def _shows(self, token: int) -> bool:
        return token in self._kinds.known and token not in self._kinds.special

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of a prompt that have text, with the whole of a run of byte tokens."""
        found: list[int] = []
        for token in reversed(prompt):
            if len(found) >= CONTEXT and found[-1] not in self._kinds.bytes:
                break
            if self._shows(token):
                found.append(token)
        return found[::-1]


class StopSearch:
    """Finds stop texts in a text that comes in pieces; the result does not depend on where one piece ends.

    The stop text that is complete first ends the text. Of several that end at the same character the longest counts.
    """

    def __init__(self, stop: Iterable[str]):
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Returns the text that no stop text can begin in, and that lies before the first stop text."""
        if self.found:
            return ""
        text = self._held + text
        places = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)[1]]
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` with which a stop text begins."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """Returns a number of tokens that a text has at least, from its length alone; 0 where the tokenizer may drop text."""
    if (longest := _longest_token(tokenizer)) is None:
        return 0
    return len(text.encode()) // (longest * (1 if text.isascii() else MOST_SHRUNK))


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int | None:
    """Returns the most bytes of a text that a token can stand for; None for all but BPE of bytes that drops none of them."""
    raw, vocab = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
    if raw is None or type(raw.model).__name__ != "BPE":
        return None
    steps = [step for part in (raw.normalizer, raw.pre_tokenizer) if part is not None for step in _steps(part)]
    added = tokenizer.added_tokens_decoder.values()
    if any(map(_drops, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    # Without a token for each byte, all that is unknown could be one token, or none.
    single = (
        ByteLevel.alphabet() if of_bytes else [f"<0x{byte:02X}>" for byte in range(256)] if raw.model.byte_fallback else [""]
    )
    if not set(single) <= vocab.keys():
        return None
    return max(
        *(len(name) if of_bytes else len(name.encode()) for name in vocab), *(len(each.content.encode()) for each in added)
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer or pre-tokenizer, and of all that it consists of."""
    found = [json.loads(part.__getstate__())]
    for step in found:
        found += [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    return found


def _drops(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is None or len(step["content"].encode()) < len(replaced.encode())
    return step["type"] not in KEPT or step.get("behavior") == "Removed"


@functools.lru_cache(maxsize=4)
def _kinds_of_tokens(tokenizer: Any) -> _Kinds:
    """Reads the vocabulary once for all streams of a tokenizer; that takes some 0.1 s."""
    vocab = tokenizer.get_vocab()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return _Kinds(
        special=frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special),
        bytes=frozenset(vocab[name] for name in names if name in vocab),
        known=frozenset(vocab.values()),
    )
