"""Small preference data: random prompts and answers as tokens, and batches of them in our layout and in TRL's."""

import jax.numpy as jnp
import numpy as np
import torch

from moe_jax.preferences.batches import Example, OpenRows, Text
from tests.helpers import seeds


def make_text(prompt, answer):
    return Text(np.asarray([*prompt, *answer], np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))


def make_pairs(number=5, vocab=97):
    """Returns pairs of answers of 1 to 6 tokens to prompts of 1 to 5."""
    rng = seeds.rng()

    def draw(most):
        return rng.integers(1, vocab, rng.integers(1, most + 1))

    pairs = []
    for index in range(number):
        prompt = draw(5)
        pairs.append(Example(index, (make_text(prompt, draw(6)), make_text(prompt, draw(6)))))
    return pairs


def make_answers(desirable=(1, 0, 0, 1, 0)):
    """Returns single answers, each with the answer to the previous example."""
    pairs = make_pairs(len(desirable))
    answers = [example.texts[0] for example in pairs]
    found = []
    for index, (text, other, liked) in enumerate(zip(answers, answers[-1:] + answers[:-1], desirable, strict=True)):
        mismatched = make_text(text.tokens[~text.learned], other.tokens[other.learned])
        found.append(Example(index, (text,), mismatched, bool(liked)))
    return found


def packed_batch(examples, rows=2, seq_len=66, max_examples=4):
    """Returns our batch of the examples; all of them must fit."""
    open_rows = OpenRows(rows, seq_len, max_examples)
    assert all(open_rows.add(example) for example in examples)
    return {name: jnp.asarray(array) for name, array in open_rows.arrays().items()}


def padded(texts):
    """Returns tokens, attention mask and mask of the answers as TRL's collators make them, of type int64."""
    length = max(len(text.tokens) for text in texts)
    rows = [[np.pad(part, (0, length - len(part))) for part in (t.tokens, np.ones(len(t.tokens)), t.learned)] for t in texts]
    return [torch.tensor(np.stack(part)).long() for part in zip(*rows, strict=True)]


def trl_inputs(texts, prefix=""):
    """Returns the inputs of TRL's DPO and KTO trainers."""
    names = "input_ids", "attention_mask", "completion_mask"
    return {prefix + name: array for name, array in zip(names, padded(texts), strict=True)}


def concatenated_inputs(pairs):
    """Returns the inputs of TRL's ORPO and CPO trainers."""
    inputs = {}
    for i, name in enumerate(("chosen", "rejected")):
        tokens, attention, answered = padded([pair.texts[i] for pair in pairs])
        labels = torch.where(answered != 0, tokens, -100)
        inputs |= {f"{name}_input_ids": tokens, f"{name}_attention_mask": attention, f"{name}_labels": labels}
    return inputs
