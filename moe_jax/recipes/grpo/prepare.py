"""A run of reinforcement learning before its weights are read: data, rewards and sizes, checked together."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.models.decoder import Decoder
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.layout import mesh_of
from moe_jax.recipes.grpo.settings import GrpoSettings
from moe_jax.recipes.run.identity import identity_of
from moe_jax.recipes.run.model import PlannedModel, plan_model
from moe_jax.reinforcement.environments import check_environment, name_of
from moe_jax.reinforcement.policy import check_architecture
from moe_jax.reinforcement.prompts import Prompts, open_prompts, prompt_tokens, prompts_within
from moe_jax.reinforcement.reward_calls import function_at
from moe_jax.reinforcement.rewards import Scorer
from moe_jax.serving.conversation import model_defaults
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
      limits: the sizes of the engine that draws a step's answers.
      identity: the facts that may not change between the start of the run and its resumption, except the starting weights.
    """

    settings: GrpoSettings
    prompts: Prompts
    eval_prompts: Prompts | None
    scorer: Scorer
    environment: Callable[[], Any] | None
    limits: EngineLimits
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
    if jax.process_count() > 1:
        raise ValueError(f"grpo runs in one process, which computes on all its devices; got {jax.process_count()}")
    mesh = None if model is None else mesh_of(nnx.state(model))
    if mesh is not None and settings.mesh.size == 1:
        settings = replace(settings, mesh=MeshShape(**mesh.shape))
    planned = plan_model(settings, model, tokenizer)
    limits = _limits(settings, planned.devices)
    adapted, drops = () if planned.lora is None else planned.lora.kinds, settings.lora is not None and settings.lora.dropout > 0
    dtype = jnp.dtype(settings.dtype) if model is None else model.dtype
    check_architecture(planned.config, dtype, exact=settings.exact, adapted=adapted, drops=drops)

    def length_of(row: Mapping[str, Any]) -> int:
        if environment is not None and isinstance(row["prompt"], str):
            raise ValueError(f"an environment needs prompts of messages; this one is the text {row['prompt']!r:.80}")
        return len(prompt_tokens(planned.tokenizer, row["prompt"]))

    def prompts_of(path: str) -> Prompts:
        return prompts_within(open_prompts(path), settings.max_prompt, length_of)

    prompts = prompts_of(settings.data)
    functions, name = [*settings.reward, *rewards], None
    if environment is not None:
        source = settings.model if model is None else model.source
        ends = model_defaults(source, planned.config, planned.tokenizer).ends_of_answers
        if check_environment(environment, prompts.columns, planned.tokenizer, ends):
            name = name_of(environment)
    if not functions and name is None:
        raise ValueError('there is no reward: give settings.reward, such as "rewards.py:correct", or the argument `rewards`')
    weights, number = settings.reward_weights, len(functions) + (name is not None)
    if weights is not None and len(weights) != number:
        raise ValueError(f"reward_weights={weights!r} must have a weight for each of the {number} rewards")
    calls: dict[str, Any] = dict(reward_timeout=settings.reward_timeout, on_reward_error=settings.on_reward_error)
    scorer = Scorer(functions, environment=name, **calls)
    scorer.check(prompts[0])
    eval_prompts = None if settings.eval_data is None else prompts_of(settings.eval_data)
    if eval_prompts is not None and eval_prompts.fingerprint == prompts.fingerprint:
        raise ValueError(f"eval_data={settings.eval_data!r} has the same contents as data, and must not be trained on")
    if settings.epochs is not None:
        steps = math.ceil(settings.epochs * len(prompts) / settings.prompts - 1e-9)
        settings = replace(settings, steps=max(1, steps), epochs=None)
    identity = identity_of(settings, planned.config, planned.tokenizer, prompts.fingerprint)
    identity |= json.loads(
        json.dumps({"grpo": asdict(settings.grpo), "rewards": scorer.names, "max_prompt": settings.max_prompt})
    )
    of_data: dict[str, Any] = dict(prompts=prompts, eval_prompts=eval_prompts, scorer=scorer, environment=environment)
    return PlannedGrpo(**vars(planned), settings=settings, limits=limits, identity=identity, **of_data)


def _limits(settings: GrpoSettings, devices: int) -> EngineLimits:
    sizes, answers = settings.engine, settings.prompts * settings.samples
    replicas = devices if sizes.replicas is None else sizes.replicas
    sequences = min(-(-answers // replicas), MOST_SEQUENCES) if sizes.max_sequences is None else sizes.max_sequences
    pages = min(sequences * -(-settings.max_length // 64) + 1, MOST_PAGES) if sizes.num_pages is None else sizes.num_pages
    limits = EngineLimits(
        max_sequences=sequences,
        max_length=settings.max_length,
        num_pages=pages,
        max_waiting=answers * settings.eval_batches,
        replicas=replicas,
    )
    if replicas > (most := jax.local_device_count()):
        raise ValueError(f"engine.replicas={replicas} must be at most {most}, the devices of this process")
    if limits.longest_in_pages < settings.max_length:
        raise ValueError(
            f"engine.num_pages={pages} has room for {limits.longest_in_pages} tokens; an answer with its prompt may have "
            f"{settings.max_length}: give more pages, or a smaller engine.max_length"
        )
    return limits
