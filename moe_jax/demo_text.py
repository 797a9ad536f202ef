"""The demo's text, found on every machine with Python: the standard library's source files; and a tokenizer trained on it."""

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idlelib ensurepip lib2to3 turtledemo encodings pydoc_data __pycache__".split()
)
"""Folders of other people's packages, of tests, of tools, and of tables that are hardly code."""


def library_texts(every_nth: int) -> list[str]:
    """Each n-th source file of Python's standard library in the order of their paths, tests and tools left out."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    texts = [path.read_text("utf-8", errors="replace") for path in files[::every_nth]]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise FileNotFoundError(f"no Python source files under {library}: is the standard library installed as .py files?")
    return texts


def split_source(text: str, at_least: int = 1000) -> list[str]:
    """Cuts source text before unindented lines that follow a blank one, into pieces of `at_least` characters or more.

    The last piece may be shorter. Whole files in a row would fill a batch with one subject; pieces shuffle well.
    """
    pieces, start, blank_before = [], 0, False
    position = 0
    for line in text.splitlines(keepends=True):
        if blank_before and not line[0].isspace() and position - start >= at_least:
            pieces.append(text[start:position])
            start = position
        position += len(line)
        blank_before = not line.strip()
    return [*pieces, text[start:]] if text[start:].strip() else pieces


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, the first of which ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
