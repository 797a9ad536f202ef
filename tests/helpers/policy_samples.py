"""Small groups of samples with random tokens, log-probabilities and rewards."""

import jax.numpy as jnp
import numpy as np

from moe_jax.reinforcement import Group, Sample, advantages, policy_rows, token_weights, total_rewards


def make_sample(rng, answer, *, tools=False, finish_reason="stop", experts=None, prompt=0, vocab=97):
    """Returns an answer of this length. `tools`: some tokens are a tool's. `experts`: (layers, choices, number of experts)."""
    own = np.ones(answer, bool)
    if tools and answer > 2:
        own[1 : 1 + int(rng.integers(1, answer - 1))] = False
    log_probs = np.where(own, -rng.gamma(1.0, 1.0, answer), 0).astype(np.float32)
    ids = None
    if experts is not None:
        layers, choices, number = experts
        shape = prompt + answer - 1, layers
        ids = np.argsort(rng.random((*shape, number)), axis=-1)[..., :choices].astype(np.uint8)
    options = dict(finish_reason=finish_reason, text="", expert_ids=ids)
    return Sample(
        seed=int(rng.integers(1 << 31)), tokens=rng.integers(1, vocab, answer), log_probs=log_probs, own=own, **options
    )


def make_groups(rng, groups=3, samples=4, *, longest=8, functions=1, vocab=97, **options):
    """Returns groups with prompts of 1 to 5 tokens, answers of 1 to `longest`, and normal rewards."""
    found = []
    for key in range(groups):
        prompt = rng.integers(1, vocab, rng.integers(1, 6))
        drawn = [
            make_sample(rng, int(rng.integers(1, longest + 1)), prompt=len(prompt), vocab=vocab, **options)
            for _ in range(samples)
        ]
        rewards = rng.normal(size=(samples, functions))
        found.append(Group(key=key, row={}, prompt_tokens=prompt, samples=tuple(drawn), rewards=rewards))
    return found


def random_like(rng, groups, scale=0.3):
    """Returns normal numbers for each token of each sample."""
    return [[rng.normal(0, scale, len(sample.tokens)).astype(np.float32) for sample in group.samples] for group in groups]


def packed(groups, settings, *, seq_len=64, weights=None, num_rows=None, multiple_of=1, micro_batches=1, **of_tokens):
    """Returns a batch of the groups as JAX arrays, their advantages from their rewards.

    `of_tokens` are further arrays, such as old_log_probs: numbers for each token of each sample. Without `num_rows` the number
    of rows is the least multiple of `multiple_of`.
    """
    weights = token_weights(groups, settings) if weights is None else weights
    of_groups = advantages([total_rewards(group, settings) for group in groups], settings)
    if num_rows is None:
        least = len(policy_rows(groups, of_groups, weights, seq_len=seq_len)["tokens"])
        num_rows = -(-least // multiple_of) * multiple_of
    options = dict(seq_len=seq_len, num_rows=num_rows, micro_batches=micro_batches)
    batch = policy_rows(groups, of_groups, weights, **options)
    batch |= {name: policy_rows(groups, values, weights, **options)["advantage"] for name, values in of_tokens.items()}
    return {name: jnp.asarray(array) for name, array in batch.items()}
