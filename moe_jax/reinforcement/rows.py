"""Packed rows of samples: each prompt with its answer is a segment, and each value is stored where its token is predicted.

    tokens              p p a b c p p a d _     sample 0 wrote a, b and c to the prompt p p; sample 1 wrote a and d
    segment_ids         1 1 1 1 1 2 2 2 2 0
    loss_mask           0 x x x 0 0 y y 0 0     f32, the weights of tokens: x for sample 0, y for sample 1
    advantage           0 A A A 0 0 B B 0 0
    sampled_log_probs   0 l l l 0 0 m m 0 0
    sample              0 0 0 0 0 1 1 1 1 -     int32, numbers of samples over all groups; -1 for padding

The last token of a sample predicts nothing. Tokens of prompts and tools have no weight.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from moe_jax.preferences.batches import Text, row_of_texts
from moe_jax.reinforcement.samples import Group, Sample

Arrays = dict[str, np.ndarray]


def policy_rows(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Float[np.ndarray, ""] | Float[np.ndarray, " answer"]] | Float[np.ndarray, " samples"]],
    weights: Sequence[Sequence[Float[np.ndarray, " answer"]]],
    *,
    seq_len: int,
    num_rows: int | None = None,
    micro_batches: int = 1,
) -> Arrays:
    """Returns a batch for `PolicyLoss`, arrays [rows, seq_len] as drawn above.

    Samples are put, in their order, into the first row that has room. Samples whose weights are all 0 are left out. If samples
    have experts, "expert_ids" [rows, seq_len, layers, choices] holds them.

    Args:
      advantages: of each group's samples (`advantages`), or of each token of their answers.
      weights: as `token_weights` returns them.
      num_rows: the number of rows; unused rows are padding. None: the least number.
      micro_batches: the number that divides the rows; the last ones hold the padding. Micro-batch i of n has rows i, i + n, ...

    Raises:
      ValueError: no samples, a sample longer than a row, experts of some samples or tokens alone, or too small a `num_rows`.
    """
    parts = list[Arrays]()
    for group, of_group, its_weights in zip(groups, advantages, weights, strict=True):
        for i, (sample, advantage, weight) in enumerate(zip(group.samples, of_group, its_weights, strict=True)):
            name = f"group {group.key}, sample {i}"
            values = dict(loss_mask=weight, advantage=advantage, sampled_log_probs=sample.log_probs)
            parts.append(_arrays(name, len(parts), group.prompt_tokens, sample, values))
            if (length := len(parts[-1]["tokens"])) > seq_len:
                raise ValueError(f"{name} has {length} tokens of prompt and answer; a row has seq_len={seq_len}")
            if parts[-1].keys() != parts[0].keys():
                raise ValueError(f"{name}: all samples must have expert_ids, or none of them")
    if not parts:
        raise ValueError("groups must hold at least one sample")
    rows, free = list[list[Arrays]](), np.zeros(0, int)
    for part in parts:
        if part["loss_mask"].any():
            row = int(np.argmax(np.append(free, seq_len) >= len(part["tokens"])))
            if row == len(rows):
                rows, free = [*rows, []], np.append(free, seq_len)
            rows[row].append(part)
            free[row] -= len(part["tokens"])
    wanted = max(1, len(rows)) if num_rows is None else num_rows
    if len(rows) > wanted:
        raise ValueError(f"num_rows={num_rows} must be at least {len(rows)} for these samples")
    used = max(1, -(-len(rows) * micro_batches // wanted))
    numbers = {row // used * micro_batches + row % used: of_row for row, of_row in enumerate(rows)}
    rows = [numbers.get(row, []) for row in range(wanted)]
    return {name: np.stack([_joined(name, row, like, seq_len) for row in rows]) for name, like in parts[0].items()}


def _arrays(name: str, number: int, prompt: np.ndarray, sample: Sample, values: dict[str, np.ndarray]) -> Arrays:
    """Returns the arrays of one sample, [tokens of prompt and answer, ...]."""
    answer, length = len(sample.tokens), len(prompt) + len(sample.tokens)
    arrays = row_of_texts([Text(np.append(prompt, sample.tokens), np.arange(length) >= len(prompt))], length)
    for array, of_tokens in values.items():
        # The token at position i is predicted at position i - 1.
        arrays[array] = np.pad(np.broadcast_to(np.asarray(of_tokens, np.float32), answer), (len(prompt) - 1, 1))
    arrays["sample"] = np.full(length, number, np.int32)
    if (ids := sample.expert_ids) is not None:
        if len(ids) not in (length - 1, length):
            raise ValueError(f"{name} has expert_ids of {len(ids)} tokens; prompt and answer have {length}")
        # Nothing is predicted at the last token, so its experts may be missing.
        arrays["expert_ids"] = np.pad(ids, [(0, length - len(ids)), (0, 0), (0, 0)], mode="edge")
    return arrays


def _joined(name: str, row: Sequence[Arrays], like: np.ndarray, seq_len: int) -> np.ndarray:
    parts = [part[name] * (k if name == "segment_ids" else 1) for k, part in enumerate(row, start=1)]
    joined = np.concatenate([like[:0], *parts])
    padding = [(0, seq_len - len(joined))] + [(0, 0)] * (joined.ndim - 1)
    return np.pad(joined, padding, constant_values=-1 if name == "sample" else 0)
