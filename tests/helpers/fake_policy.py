"""A policy without an engine: it draws answers from seeds and weights, and learns by adding a number to all parameters."""

import time
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from moe_jax.reinforcement.prompts import prompt_tokens, seed_of
from moe_jax.reinforcement.samples import Group, Sample
from moe_jax.train.state import init_state

LETTERS = "abcdefgh"


class FakePolicy:
    """Has the interface of `reinforcement.Policy`.

    An answer is a word of 1 to `max_new_tokens` letters. It follows from the seed's names and the weights. Without `exact` its
    log-probabilities also follow from the requests that are queued together, as in an engine without strict bits.
    """

    seconds = 0.0
    """The time until a group is complete, and that of an update."""

    def __init__(self, model, optimizer, settings, *, tokenizer, limits, seq_len, rows, on_mismatch, **_):
        self.graph, self.state = nnx.graphdef(model), init_state(model, optimizer)
        self.settings, self.tokenizer, self.limits = settings, tokenizer, limits
        self.requests, self.closed = [], False

    @property
    def model(self):
        return nnx.merge(self.graph, self.state.params, self.state.fixed)

    def sample(self, rows, *, step, seed):
        self.requests.append([key for key, _ in rows])
        weight = float(np.asarray(jax.tree.leaves(self.state.params)[0]).ravel()[0])
        keys = ",".join(str(key) for key, _ in rows)
        noise = 0.0 if self.settings.exact else seed_of(*map(ord, keys)) / 2**32
        # Not in the order of the requests, as from an engine.
        for key, row in sorted(rows, key=lambda each: seed_of(*each[:1])):
            time.sleep(self.seconds)
            seeds = [seed_of(seed, step, key, i) for i in range(self.settings.samples)]
            samples = tuple(self._drawn(each, weight, noise) for each in seeds)
            prompt = np.array(prompt_tokens(self.tokenizer, row["prompt"]))
            yield Group(key=key, row=row, prompt_tokens=prompt, samples=samples)

    def draw(self, prompt, seed, max_new_tokens):
        """Returns an answer of at most 6 letters and an end token."""
        drawn = self._drawn(seed, 0.0, len(prompt) / 1000)
        tokens = np.append(drawn.tokens[:6], self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        arrays = dict(tokens=tokens, log_probs=-np.ones(len(tokens), np.float32), own=np.ones(len(tokens), bool))
        return replace(drawn, text=drawn.text[:6], finish_reason="stop", **arrays)

    def _drawn(self, seed, weight, noise):
        rng = np.random.default_rng((seed, abs(hash(weight))))
        length = int(rng.integers(1, self.settings.max_new_tokens + 1))
        text = "".join(rng.choice(list(LETTERS), length))
        tokens = np.array(self.tokenizer.encode(text))
        log_probs = (-rng.random(len(tokens)) - noise).astype(np.float32)
        experts = None if self.model.config.experts is None else np.full((1, 1, 1), seed % 8)
        return Sample(
            expert_ids=experts, seed=seed, tokens=tokens, log_probs=log_probs, own=np.ones(len(tokens), bool), text=text,
            finish_reason="length" if length == self.settings.max_new_tokens else "stop",
            weights_version=int(self.state.step),
        )  # fmt: skip

    def update(self, groups):
        time.sleep(self.seconds)
        seen = sum(
            float(np.nansum(group.rewards)) + sum(float(np.nansum(each.log_probs)) + _experts(each) for each in group.samples)
            for group in groups
        )
        params = jax.tree.map(lambda array: array + np.float32(seen * 1e-3), self.state.params)
        self.state = replace(self.state, step=self.state.step + 1, params=params)
        names = "loss", "total_loss", "grad_norm", "entropy", "mismatch_tokens", "audited_tokens"
        return dict.fromkeys(names, seen) | {"time/update": 0.1, "time/sync": 0.0, "time/audit": 0.0}

    def restore(self, state):
        self.state = state

    def close(self):
        self.closed = True


def _experts(sample):
    return 0.0 if sample.expert_ids is None else 1.0 + float(sample.expert_ids.sum())
