"""The demo's data: functions of Python's standard library, which every machine has, a tokenizer, and short chats."""

import ast
import random
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Special tokens with the ids 0, 1 and 2. The latter two begin and end a turn of a chat."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""ChatML template that marks the assistant's turns for training."""

LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idlelib ensurepip lib2to3 turtledemo encodings pydoc_data tkinter turtle.py "
    "__pycache__".split()
)
"""Excluded: third-party packages, tests, tools, tables and GUI wrappers, which would dominate a small model's output."""

MIN_LINES, MAX_CHARACTERS = 3, 400
"""Bounds of a function. Longer functions would fill whole rows, and a batch would cover few subjects."""


def library_functions(every_nth: int = 1) -> list[str]:
    """Returns short functions and methods from every n-th file of Python's standard library, shuffled, without duplicates.

    `ast.unparse` writes them without docstrings and comments: the model learns a uniform style sooner.

    Raises:
      FileNotFoundError: there are no source files, or they have no such function.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    found = [text for path in files[::every_nth] for text in functions_of(path.read_text("utf-8", errors="replace"))]
    if not found:
        raise FileNotFoundError(f"no Python functions under {library}: is the standard library installed as .py files?")
    unique = list(dict.fromkeys(found))
    random.Random(0).shuffle(unique)
    return unique


def functions_of(source: str) -> list[str]:
    """Returns the functions and methods in `source` of suitable length; none if `source` does not parse."""
    with warnings.catch_warnings():
        # The parser warns about invalid escapes in old files.
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return []
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
            if node.body:
                texts.append(ast.unparse(node) + "\n")
    return [text for text in texts if text.count("\n") >= MIN_LINES and len(text) <= MAX_CHARACTERS]


def as_chat(function: str) -> dict[str, Any]:
    """Returns a conversation: a user asks for `function` by its name and parameters, and the assistant writes it."""
    node = next(node for node in ast.parse(function).body if isinstance(node, ast.FunctionDef))
    question, answer = f"Write {node.name}({ast.unparse(node.args)}).", function.strip()
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a chat template and at most `vocab_size` tokens; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE
    )
