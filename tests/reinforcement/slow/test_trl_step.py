"""A step on the answers and rewards of TRL's trainer changes the weights as its own step does."""

import warnings
from contextlib import closing

import numpy as np
import optax
import pytest
import transformers
from safetensors.numpy import load_file

from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.samples import Group, Sample
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.request import EngineLimits
from tests.helpers import tiny

PROMPTS, SAMPLES, TOKENS = ["a b c d e", "what was "], 4, 6
LIMITS = EngineLimits(max_sequences=8, max_tokens_per_step=128, max_length=32, num_pages=9)


def step_of_trl(folder, tokenizer, loss):
    """Returns [(prompt, tokens of an answer, reward)], and the weights after a step of gradient descent, as TRL names them."""
    import datasets
    import trl

    seen = []

    def small_tokens(prompts, completion_ids, **columns):
        rewards = [float(np.mean(np.asarray(tokens) < 128)) for tokens in completion_ids]
        seen.extend(zip(prompts, completion_ids, rewards, strict=True))
        return rewards

    settings = trl.GRPOConfig(
        output_dir=str(folder / "run"), per_device_train_batch_size=len(PROMPTS) * SAMPLES, num_generations=SAMPLES,
        max_completion_length=TOKENS, max_steps=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1e9, loss_type=loss, scale_rewards="none" if loss == "dr_grpo" else "group",
        epsilon=0.2, epsilon_high=0.28, beta=0.0, router_aux_loss_coef=0.0, seed=0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": PROMPTS})
    of_trainer = dict(reward_funcs=[small_tokens], args=settings, train_dataset=data, processing_class=tokenizer)
    trainer = trl.GRPOTrainer(model=str(folder / "model"), **of_trainer)
    trainer.train()
    trainer.model.save_pretrained(folder / "after_trl")
    return seen


def groups_of(tokenizer, seen):
    groups = []
    for key in range(len(PROMPTS)):
        ((prompt, *_), *_) = of_prompt = seen[key * SAMPLES : (key + 1) * SAMPLES]
        samples = tuple(
            Sample(
                seed=0, tokens=np.asarray(tokens, np.int32), log_probs=np.zeros(len(tokens), np.float32),
                own=np.ones(len(tokens), bool), finish_reason="stop", text="",
            )
            for _, tokens, _ in of_prompt
        )  # fmt: skip
        tokens, rewards = np.asarray(tokenizer(prompt)["input_ids"], np.int32), np.array([[each[2]] for each in of_prompt])
        groups.append(Group(key=key, row={"prompt": prompt}, prompt_tokens=tokens, samples=samples, rewards=rewards))
    return groups


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["dapo", "dr_grpo"])
def test_a_step_of_trl(tmp_path, loss):
    tokenizer, model = tiny.tokenizer(), tiny.model()
    tokenizer.pad_token = "<|im_end|>"
    save_pretrained(model, tmp_path / "model", progress=False)
    with (
        warnings.catch_warnings(),
        closing(
            Policy(
                model,
                optax.sgd(1.0),
                PolicySettings(samples=SAMPLES, max_new_tokens=TOKENS, loss=loss),
                tokenizer=tokenizer,
                limits=LIMITS,
                rows=8,
            )
        ) as policy,
    ):
        warnings.simplefilter("ignore")
        policy.update(groups_of(tokenizer, step_of_trl(tmp_path, tokenizer, loss)))
        save_pretrained(policy.model, tmp_path / "after", progress=False)
    # Read by transformers, so that both have one form.
    for name in ("model", "after"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="float32")
        loaded.save_pretrained(tmp_path / f"{name}_saved")
    before, ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model_saved", "after_saved", "after_trl")
    )
    assert ours.keys() == theirs.keys()
    moved = sum(np.square(theirs[name] - before[name], dtype=np.float64).sum() for name in ours) ** 0.5
    differ = sum(np.square(theirs[name] - ours[name], dtype=np.float64).sum() for name in ours) ** 0.5
    assert moved > 1e-3 and differ < 1e-4 * moved
