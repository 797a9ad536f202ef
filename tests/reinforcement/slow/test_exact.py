"""Exact mode: values and gradients of an update equal `strict_log_probs` bit for bit; the audit notices all other bits."""

from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax import adapters
from moe_jax.adapters.merge import merged_copy, with_zero_changes
from moe_jax.kernels.vocabulary import TokenScores
from moe_jax.reinforcement import audit as audits
from moe_jax.reinforcement import objective
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.request import EngineLimits
from moe_jax.serving.strict_log_probs import strict_log_probs
from moe_jax.train.batch import put_batch
from tests.helpers import tiny
from tests.serving.slow.test_fused import CONFIG, ONE_LAYER
from tests.serving.slow.test_strict_gradients import DENSE as DENSE_CONFIG

DENSE = replace(DENSE_CONFIG, vocab_size=384)
LIMITS = EngineLimits(max_sequences=1, max_tokens_per_step=8, max_chunks_per_step=1, max_length=8, num_pages=4, max_waiting=4)
SETTINGS = PolicySettings(samples=2, max_new_tokens=2, exact=True, temperature=0.7)
PROMPTS = [(7, {"prompt": "ab"})]


def drawn(policy, step, **changes):
    (group,) = policy.sample(PROMPTS, step=step, seed=0, **changes)
    return replace(group, rewards=np.asarray([[1.0], [0.0]]))


def changed(group, **fields):
    """Returns the group with other fields of its last sample."""
    return replace(group, samples=(*group.samples[:-1], replace(group.samples[-1], **fields)))


@pytest.mark.parametrize("config", [ONE_LAYER, pytest.param(CONFIG, marks=pytest.mark.thorough)], ids=["one layer", "two"])
def test_exact(monkeypatch, config):
    model = moe_jax.from_config(
        replace(config, vocab_size=384, num_experts=16), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    # The trace keeps a step's gradients.
    optimizer = optax.chain(optax.trace(0.0), optax.sgd(1.0))
    with closing(Policy(model, optimizer, SETTINGS, tokenizer=tiny.tokenizer(), limits=LIMITS, seq_len=16, rows=2)) as policy:
        group = drawn(policy, 0)
        batch = policy._batch([group], 2)
        strict = strict_step(policy, batch, monkeypatch)
        check_controls(policy, group, batch, monkeypatch)
        metrics = policy.update([group])
        assert (metrics["audited_tokens"], metrics["mismatch_tokens"], metrics["mismatch_max"]) == (4, 0, 0)
        replayed, wanted = (optax.tree.get(state.opt_state, "trace") for state in (policy.state, strict))
        for (path, one), other in zip(jax.tree.leaves_with_path(replayed), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(path))
        assert optax.tree.norm(replayed) > 0
        # Yesterday's weights, and today's.
        with pytest.raises(ValueError, match="group 7 was drawn by weights of another step than 1"):
            policy.update([group])
        assert audits.audit(model, batch, [group], np.arange(1), 0.7)[0]["mismatch_tokens"] >= 4
        metrics = policy.update([drawn(policy, 1)])
        assert (metrics["audited_tokens"], metrics["mismatch_tokens"]) == (4, 0)


def strict_step(policy, batch, monkeypatch):
    """Returns the state after a step by the loss of `strict_log_probs`, which leaves the policy as it is."""

    def strict_scores(model, batch, states=None, **options):
        found = strict_log_probs(model, batch["tokens"], batch["segment_ids"], max_segments=8, **options)
        return TokenScores(jnp.pad(found, ((0, 0), (0, 1))), jnp.zeros(batch["tokens"].shape))

    with monkeypatch.context() as patched:
        patched.setattr(objective, "sampled_token_scores", strict_scores)
        step = policy._make_step(gradient_accumulation=1)
        return step(jax.tree.map(jnp.copy, policy.state), put_batch(batch, policy.state.params))[0]


def check_controls(policy, group, batch, monkeypatch):
    """Each wrong group fails the audit, by its name. Groups without experts, as of a journal, get the strict pass's experts."""
    found = audits.strict_rows(policy.model, batch, np.arange(1), 0.7)
    last = group.samples[-1]
    with monkeypatch.context() as patched:
        patched.setattr(audits, "strict_rows", lambda *_: found)
        experts = np.array(last.expert_ids)
        experts[1, -1, 0] = (experts[1, -1, 0] + 1) % 16
        for wrong, message in (
            (changed(group, log_probs=np.roll(last.log_probs, 1)), "2 of 4 .* group 7, sample 1, token 0 of the answer: -"),
            (changed(group, expert_ids=experts), "1 of 4 .* group 7, sample 1, token 0 of the answer: experts"),
            (drawn(policy, 0, temperature=1.0), "4 of 4 .* group 7, sample 0, token 0 of the answer: -"),
        ):
            with pytest.raises(RuntimeError, match=f"{message}.*set exact=False, or on_mismatch"):
                policy._audited([wrong], policy._batch([wrong], 2))
        none = replace(group, samples=tuple(replace(sample, expert_ids=None) for sample in group.samples))
        filled = policy._batch([none], 2)
        assert policy._audited([none], filled)["mismatch_tokens"] == 0
        segments = batch["segment_ids"]
        is_read = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        np.testing.assert_array_equal(filled["expert_ids"][:, :-1][is_read], batch["expert_ids"][:, :-1][is_read])


@pytest.mark.thorough
def test_exact_with_adapters():
    """The engine and the audit have merged copies. A divergence from the reference begins at 0. A stale merge is noticed.

    All of it holds with keys and values in FP8 too.
    """
    model = moe_jax.from_config(DENSE, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    adapters.add_lora(model, adapters.LoraSettings(rank=2, targets=("attention",)), rngs=nnx.Rngs(1))
    settings, tokenizer = replace(SETTINGS, beta=0.1, temperature=1.0), tiny.tokenizer()
    limits = replace(LIMITS, kv_dtype="fp8")
    policy = Policy(model, optax.adam(3e-2), settings, tokenizer=tokenizer, limits=limits, seq_len=16)
    with closing(policy):
        kls = []
        for step in range(2):
            metrics = policy.update([drawn(policy, step)])
            assert (metrics["audited_tokens"], metrics["mismatch_tokens"]) == (4, 0)
            kls.append(metrics["kl"])
        assert kls[0] == 0 < kls[1]
        policy.engine.update(merged_copy(with_zero_changes(model)))
        with pytest.raises(RuntimeError, match="of 4 audited tokens differ, the first in group 7"):
            policy.update([drawn(policy, 2)])
