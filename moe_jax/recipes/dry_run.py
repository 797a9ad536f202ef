"""A rehearsal of a run: checks everything, and prints the text that the run would learn from. Trains and writes nothing."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_jax.adapters.add import planned_lora
from moe_jax.cost.plan_table import rollout_table
from moe_jax.cost.planned_step import PlannedAdapters, PlannedStep
from moe_jax.cost.rollout import PlannedRollout, predict_rollout, rows_of
from moe_jax.cost.step import predict
from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import example_tokens
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.prepare import plan_run
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.grpo.prepare import PlannedGrpo, plan_grpo
from moe_jax.recipes.grpo.settings import GrpoSettings
from moe_jax.recipes.preferring.loop import plan_preferences
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.identity import saved_run
from moe_jax.reinforcement.environments import opening
from moe_jax.reinforcement.prompts import prompt_at, prompt_tokens
from moe_jax.reinforcement.samples import Group, Sample
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Documents
from moe_jax.train.data.report import COLORED, PLAIN, marked

MADE_UP = "The answer is 42."


def dry_run(
    settings: FinetuneSettings | PreferSettings | GrpoSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    environment: Callable[[], Any] | None = None,
) -> None:
    """Prints the announcement of a run, and a part of the first batch with the learned text marked.

    For `grpo` it prints two prompts, the rewards of a made-up answer, and in bfloat16 the predicted cost of a step on H200s.
    With an environment each prompt has the text that `reset` returned, and the tools. No answer is drawn.

    Args: as in `finetune`, `prefer` and `grpo`. No weights are read, and no file is written.

    Raises:
      ValueError, FileNotFoundError: as the run raises before it reads weights.
      RuntimeError: a reward function, or `reset`, raised.
    """
    marks = COLORED if sys.stdout.isatty() else PLAIN
    if isinstance(settings, GrpoSettings):
        text = _of_rewards(plan_grpo(settings, rewards, model, tokenizer, environment))
    elif isinstance(settings, PreferSettings):
        text = _of_preferences(settings, model, tokenizer, marks)
    else:
        text = _of_texts(settings, model, tokenizer, marks)
    if is_first_process():
        print(f"{text}\n\ndry run: nothing was trained or written")


def _of_texts(settings: FinetuneSettings, model: Decoder | None, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Describes a fine-tuning run, with the first row of its first batch that has learned text."""
    run = plan_run(settings, model, tokenizer)
    try:
        batch = next(run.batches)
    finally:
        run.batches.close()
    row = int(np.argmax(batch["loss_mask"].any(axis=1)))
    said = described_row({name: array[row] for name, array in batch.items()}, run.documents, run.tokenizer, marks)
    how = f"learned text is {'green' if marks == COLORED else 'in [[ ]]'}"
    return f"{announcement(run, saved_run(settings.output)[0])}\n\nA row of the first batch; {how}:\n\n{said}"


def _of_preferences(settings: PreferSettings, model: Decoder | None, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Describes a run on preferences, with the texts of its first example."""
    plan = plan_preferences(settings, model, tokenizer)
    batches = plan.batches(plan.data)
    batches.close()
    tokens = example_tokens(plan.data, plan.tokenizer, batches.max_length)
    example = next(filter(None, map(tokens, range(len(plan.data)))))
    parts, names = [plan.announcement(saved_run(settings.output)[0])], ("chosen", "rejected")
    for name, text in zip(names if plan.data.of_pairs else ("answer",), example.texts, strict=True):
        parts.append(f"--- {name} of {plan.data.where(example.number)}: {len(text.tokens)} tokens")
        parts[-1] += f"\n{marked(plan.tokenizer, text.tokens, text.learned, marks)}"
    return "\n\n".join(parts)


def _of_rewards(plan: PlannedGrpo) -> str:
    """Describes a run of reinforcement learning, with the first two prompts and the rewards of a made-up answer."""
    settings = plan.settings
    answer = plan.tokenizer.encode(MADE_UP, add_special_tokens=False)
    arrays: dict[str, Any] = dict(tokens=np.array(answer), log_probs=np.zeros(len(answer)), own=np.ones(len(answer), bool))
    sample = Sample(seed=0, finish_reason="stop", text=MADE_UP, **arrays)
    parts, lengths = [plan.announcement(saved_run(settings.output)[0])], []
    with plan.scorer as scorer:
        for key in range(2):
            row = prompt_at(plan.prompts, key, settings.seed)
            row, tokens = _opened(plan, key, row)
            group = Group(key=key, row=row, prompt_tokens=np.array(tokens), samples=(sample,) * settings.samples)
            [scored] = scorer.score([group])
            found = dict(zip(scorer.names, np.asarray(scored.rewards)[0].tolist(), strict=True))
            parts.append(f"--- a prompt of {len(tokens)} tokens; the answer {MADE_UP!r} has the rewards {found}")
            parts[-1] += f"\n{plan.tokenizer.decode(tokens)}"
            lengths.append(len(tokens))
    if settings.dtype == "bfloat16":
        parts.append(_prediction(plan, max(lengths)))
    return "\n\n".join(parts)


def _prediction(plan: PlannedGrpo, prompt_tokens: int) -> str:
    """Returns the predicted time and memory of a step on H200s, if all answers have their maximum length."""
    settings, limits = plan.settings, plan.limits
    sizes = settings.max_new_tokens, limits.replicas, limits.max_sequences, limits.num_pages
    rollout = PlannedRollout(settings.prompts * settings.samples, settings.samples, prompt_tokens, *sizes)
    number = -(-rows_of(rollout, settings.seq_len) // settings.rows)
    adapters: PlannedAdapters | None = None
    if settings.lora is not None:
        found, trained = planned_lora(plan.config, settings.lora), settings.lora.targets or ("experts",)
        of_weights = settings.weights, "experts" in trained, found.factors
        adapters = PlannedAdapters(found.summary.parameters, found.moved_elements, "", *of_weights)
    names = "param_dtype", "optimizer", "moment_dtype"
    options: dict[str, Any] = {name: getattr(settings, name) for name in names} | {"adapters": adapters}
    rows = number * settings.rows, settings.seq_len
    try:
        step = PlannedStep(plan.config, settings.mesh, *rows, gradient_accumulation=number, **options)
        lines = rollout_table([predict_rollout(rollout, predict(step))])
    except ValueError as error:
        return f"there is no prediction: {error}"
    return "\n".join([f"--- predicted for H200s, if all answers have {settings.max_new_tokens} tokens", *lines])


def _opened(plan: PlannedGrpo, key: int, row: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns a row whose prompt includes the environment's text, and the prompt's tokens."""
    if plan.environment is None:
        return row, prompt_tokens(plan.tokenizer, row["prompt"])
    made = plan.environment()
    try:
        messages, tokens = opening(key, row, [made], plan.tokenizer)
    except Exception as error:  # of any kind, as the user's code raises it
        raise RuntimeError(f"reset raised {type(error).__name__}: {error}; prompt {key}: {row!r:.400}") from error
    finally:
        getattr(made, "close", lambda: None)()
    return {**row, "prompt": messages}, tokens


def described_row(row: dict[str, np.ndarray], documents: Documents, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Returns the text of a packed row ([seq_len] by name), segment by segment, with learned text between `marks`.

    A piece's first token counts as not learned: if a document was cut there, the piece before learned the token.
    """
    parts = []
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        inside = np.flatnonzero(row["segment_ids"] == segment)
        tokens = row["tokens"][inside]
        weights = row["loss_mask"][inside]
        parts.append(
            f"--- segment {segment}: {len(inside)} tokens, {int((weights != 0).sum())} learned, of "
            f"{documents.where(int(row['document'][inside[0]]))}"
        )
        parts.append(marked(tokenizer, tokens, np.append(0, weights[:-1]).astype(np.float32), marks))
    parts.append(f"--- padding: {int((row['segment_ids'] == 0).sum())} tokens")
    return "\n".join(parts)
