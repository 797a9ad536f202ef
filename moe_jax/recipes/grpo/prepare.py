"""A run of reinforcement learning before its weights are read: data, rewards and sizes, checked together."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moe_jax.models.decoder import Decoder
from moe_jax.recipes.grpo.settings import GrpoSettings
from moe_jax.recipes.run.identity import identity_of
from moe_jax.recipes.run.model import PlannedModel, plan_model
from moe_jax.reinforcement.prompts import Prompts, open_prompts, prompt_tokens, prompts_within
from moe_jax.reinforcement.reward_calls import function_at
from moe_jax.reinforcement.rewards import Scorer
from moe_jax.serving.request import EngineLimits

MOST_PAGES, MOST_SEQUENCES = 4096, 256


@dataclass(frozen=True)
class PlannedGrpo(PlannedModel):
    """A run whose data, rewards and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      prompts, eval_prompts: the data; `eval_prompts` is None without a measurement.
      scorer: the reward functions.
      environment: makes the environment of a sample; None: answers have one turn.
      identity: the facts that may not change between the start of the run and its resumption, except the starting weights.
    """

    settings: GrpoSettings
    prompts: Prompts
    eval_prompts: Prompts | None
    scorer: Scorer
    environment: Callable[[], Any] | None
    identity: dict[str, Any]

    def announcement(self, steps_done: int) -> str:
        """Returns a few lines: the trained adapters, the data, the rewards, the steps and the epochs."""
        settings, prompts = self.settings, self.prompts
        trained = "" if self.lora is None else f"{self.lora}\n"
        long = (
            f"; {prompts.left_out:,} more have over {settings.max_prompt} tokens and are left out" if prompts.left_out else ""
        )
        held_out = ""
        if self.eval_prompts is not None:
            number = settings.eval_batches * settings.prompts
            held_out = f"held out: {len(self.eval_prompts):,} prompts; the mean reward of {number} is measured every "
            held_out += f"{settings.eval_every} steps\n"
        epochs = settings.steps * settings.prompts / len(prompts)
        return (
            f"{trained}{len(prompts):,} prompts{long}, loss {settings.grpo.loss}, rewards {', '.join(self.scorer.names)}\n"
            f"{held_out}steps {steps_done + 1} to {settings.steps}, {settings.prompts} prompts x {settings.samples} answers of "
            f"up to {settings.max_new_tokens} tokens a step: about {epochs:.2g} epochs"
        )


def plan_grpo(
    settings: GrpoSettings,
    rewards: Sequence[Callable[..., Any] | str],
    model: Decoder | None,
    tokenizer: Any,
    environment: Callable[[], Any] | None = None,
) -> PlannedGrpo:
    """Checks everything that can be checked without weights, and writes nothing; arguments and errors as in `grpo`."""
    if environment is None and settings.environment is not None:
        environment = function_at(settings.environment)
    functions, name = [*settings.reward, *rewards], None
    if hasattr(environment, "get_reward"):
        name = getattr(environment, "__name__", type(environment).__name__)
    if not functions and name is None:
        raise ValueError('there is no reward: give settings.reward, such as "rewards.py:correct", or the argument `rewards`')
    weights, number = settings.reward_weights, len(functions) + (name is not None)
    if weights is not None and len(weights) != number:
        raise ValueError(f"reward_weights={weights!r} must have a weight for each of the {number} rewards")
    planned = plan_model(settings, model, tokenizer)

    def prompts_of(path: str) -> Prompts:
        length_of = lambda row: len(prompt_tokens(planned.tokenizer, row["prompt"]))  # noqa: E731
        return prompts_within(open_prompts(path), settings.max_prompt, length_of)

    prompts = prompts_of(settings.data)
    eval_prompts = None if settings.eval_data is None else prompts_of(settings.eval_data)
    if eval_prompts is not None and eval_prompts.fingerprint == prompts.fingerprint:
        raise ValueError(f"eval_data={settings.eval_data!r} has the same contents as data, and must not be trained on")
    if settings.epochs is not None:
        steps = math.ceil(settings.epochs * len(prompts) / settings.prompts - 1e-9)
        settings = replace(settings, steps=max(1, steps), epochs=None)
    calls: dict[str, Any] = dict(reward_timeout=settings.reward_timeout, on_reward_error=settings.on_reward_error)
    scorer = Scorer(functions, environment=name, **calls)
    identity = identity_of(settings, planned.config, planned.tokenizer, prompts.fingerprint)
    identity |= json.loads(
        json.dumps({"grpo": asdict(settings.grpo), "rewards": scorer.names, "max_prompt": settings.max_prompt})
    )
    of_data: dict[str, Any] = dict(prompts=prompts, eval_prompts=eval_prompts, scorer=scorer, environment=environment)
    return PlannedGrpo(**vars(planned), settings=settings, identity=identity, **of_data)


def limits_of(settings: GrpoSettings) -> EngineLimits:
    """Returns the limits of the engine that draws a step's answers."""
    sizes, answers = settings.engine, settings.prompts * settings.samples
    sequences = min(answers, MOST_SEQUENCES) if sizes.max_sequences is None else sizes.max_sequences
    pages = min(sequences * -(-settings.max_length // 64) + 1, MOST_PAGES) if sizes.num_pages is None else sizes.num_pages
    return EngineLimits(
        max_sequences=sequences,
        max_length=settings.max_length,
        num_pages=pages,
        max_waiting=answers * settings.eval_batches,
        replicas=sizes.replicas,
    )
