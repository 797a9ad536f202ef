"""A rehearsal of a run on preferences: checks everything, and prints the first example. Trains and writes nothing."""

import itertools
from typing import Any

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.tokens import Text, example_tokens
from moe_jax.recipes.preferring.prepare import plan_preferences
from moe_jax.recipes.preferring.settings import PreferSettings


def dry_run(settings: PreferSettings, *, model: Decoder | None = None, tokenizer: Any = None) -> None:
    """Prints the announcement of `prefer`, and the texts of the first example with the learned text in [[ ]].

    Args: as in `prefer`. No weights are read, and no file is written.

    Raises:
      ValueError, FileNotFoundError: as `prefer` raises before it reads weights.
    """
    plan = plan_preferences(settings, model, tokenizer)
    print(plan.announcement(0))
    tokens = example_tokens(plan.data, plan.tokenizer, plan.batches(plan.data).max_length)
    example = next(filter(None, map(tokens, range(len(plan.data)))))
    names = ("chosen", "rejected") if plan.data.of_pairs else ("answer",)
    for name, text in zip(names, example.texts, strict=True):
        print(f"\n--- {name} of {plan.data.where(example.number)}: {len(text.tokens)} tokens\n{marked(text, plan.tokenizer)}")
    print("\ndry run: nothing was trained or written")


def marked(text: Text, tokenizer: Any) -> str:
    """Returns the text with its learned parts in [[ ]]."""
    said = ""
    for is_learned, places in itertools.groupby(range(len(text.tokens)), key=lambda i: bool(text.learned[i])):
        part = tokenizer.decode([int(text.tokens[i]) for i in places], skip_special_tokens=False)
        said += f"[[{part}]]" if is_learned else part
    return said
