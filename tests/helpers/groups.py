"""Groups of made-up answers, for tests of rewards."""

import numpy as np

from moe_jax.reinforcement.samples import Group, Sample


def sample(text="an answer", **fields):
    """Returns a sample whose tokens are its text's characters."""
    tokens = np.frombuffer(text.encode("utf-32-le"), np.int32)
    empty = {"log_probs": np.zeros(len(tokens), np.float32), "own": np.ones(len(tokens), bool)}
    return Sample(**{"seed": 0, "tokens": tokens, "finish_reason": "stop", "text": text, **empty, **fields})


def group(key=0, texts=("a", "b"), row=None, **fields):
    """Returns a group; sample i has the seed 100 key + i."""
    samples = tuple(sample(text, seed=100 * key + i) for i, text in enumerate(texts))
    row = {"prompt": f"prompt {key}", "answer": key} if row is None else row
    return Group(**{"key": key, "row": row, "prompt_tokens": np.zeros(1, np.int32), "samples": samples, **fields})
