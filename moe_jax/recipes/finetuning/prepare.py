"""Validates a fine-tuning run (data, devices, sizes, existing checkpoints) before any weights are loaded."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.recipes.finetuning.data import HeldOut, held_out_batches, open_data, run_batches, try_first_batch, with_survey
from moe_jax.recipes.finetuning.samples import sampler_of
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.run.identity import identity_of, same_run, saved_run, with_weights
from moe_jax.recipes.run.loop import Begun, begin
from moe_jax.recipes.run.model import PlannedModel, plan_model
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Batches, Documents
from moe_jax.train.data.chat_templates import with_chat_template
from moe_jax.train.data.survey import Survey
from moe_jax.train.objective import (
    LossFunction,
    check_loss_function,
    check_mtp_loss_coef,
    name_of,
    refuse_further_predictors,
)
from moe_jax.train.rebalance import num_groups
from moe_jax.train.starting_weights import MODEL

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedRun(PlannedModel):
    """A run whose data, devices and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      held_out: text that is not trained on.
      identity: what may not change between the start of the run and its resumption.
      survey: measures of the data, in the first process of a run that begins; else None.
    """

    settings: FinetuneSettings
    documents: Documents
    batches: Batches
    held_out: HeldOut
    identity: dict[str, Any]
    survey: Survey | None


def prepare_run(
    settings: FinetuneSettings, model: Decoder | None, tokenizer: Any, until_end: ExitStack, loss: LossFunction | None = None
) -> tuple[PlannedRun, Begun]:
    """Returns the run that `finetune` was asked for, with its batches at the first one to come; arguments and errors as there.

    Nothing has been written when it raises, except in a folder that holds a run. Otherwise the folder for checkpoints exists,
    and `until_end` holds its lock for this run.
    """
    plan = plan_run(settings, model, tokenizer)
    if loss is not None:
        _check_user_loss(loss, plan.settings, plan.config, plan.parallelism)
    identity = plan.identity | {"loss": None if loss is None else name_of(loss)}
    identity = with_weights(identity, model, settings.model)
    begun = begin(plan.settings, identity, plan.held_out.fingerprint, model, until_end)
    if begun.step:
        plan.batches.set_state(begun.position["data"])
        if begun.position.get("places") and plan.parallelism is not None and plan.parallelism.pipelined:
            raise ValueError(
                f"the experts of the run in {settings.output} have changed places, and in a pipe they cannot move back at the "
                "end: take a mesh without pipe"
            )
    return plan, begun


def plan_run(settings: FinetuneSettings, model: Decoder | None, tokenizer: Any) -> PlannedRun:
    """Checks everything that can be checked without weights, and writes nothing; arguments and errors as in `finetune`."""
    planned = plan_model(settings, model, tokenizer, mtp=settings.mtp)
    tokenizer, config = planned.tokenizer, planned.config
    if settings.chat_template is not None:
        tokenizer = with_chat_template(tokenizer, settings.chat_template)
    check_mtp_loss_coef(config, settings.mtp_loss_coef)
    _warn_of_far_positions(config, settings.seq_len)
    if settings.rebalance_every:
        _check_rebalancing(settings.rebalance_every, config, planned.expert_devices)
    documents, held_out_documents = open_data(settings)
    steps_done, identity_saved = saved_run(settings.output)
    # A run that began when texts had no BOS token continues without it, or its data would be other data.
    begin_texts = not identity_saved or "begin_texts" in identity_saved
    settings, found = with_survey(settings, documents, tokenizer, begin_texts, resumed=steps_done > 0)
    stream = run_batches(documents, tokenizer, settings, settings.batch_size, planned.parallelism, begin_texts)
    # Batches are made now, so that conversations that the chat template refuses are named before minutes of loading.
    held_out = held_out_batches(held_out_documents, tokenizer, settings, planned.parallelism, begin_texts)
    if not steps_done:
        try_first_batch(stream)
    sampler_of(settings, documents, tokenizer)
    identity = identity_of(settings, config, tokenizer, documents.fingerprint) | ({"begin_texts": True} if begin_texts else {})
    if model is not None:
        # The dtypes of a model that was passed hold in place of the settings'.
        identity |= {"dtype": model.dtype.name, "param_dtype": jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype.name}
    if identity_saved:
        # Starting weights are compared when they are read.
        same_run(identity_saved | {MODEL: ""}, identity | {MODEL: ""}, Path(settings.output).expanduser())
    of_model = vars(planned) | {"tokenizer": tokenizer}
    return PlannedRun(
        **of_model, settings=settings, documents=documents, batches=stream, held_out=held_out, identity=identity, survey=found
    )


def _check_user_loss(
    loss: LossFunction, settings: FinetuneSettings, config: ModelConfig, parallelism: Parallelism | None = None
) -> None:
    """Refuses a user's loss beside coefficients of the built-in one, rebalancing, a pipe, and for further-token modules."""
    check_loss_function(loss)
    coefficients = {name: getattr(settings, name) for name in ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef")}
    if given := [f"{name}={value}" for name, value in coefficients.items() if value]:
        raise ValueError(
            f"`loss` replaces the built-in loss, which alone has the factors {', '.join(given)}: add their terms to `loss`"
        )
    refuse_further_predictors(config)
    if settings.overlap_micro_batches:
        raise ValueError(
            "overlap_micro_batches=True needs the built-in loss: `loss` runs the layers itself, one micro-batch at a time; "
            "leave the setting out"
        )
    if parallelism is not None and parallelism.pipelined:
        raise ValueError(
            f"a pipe needs the built-in loss, and the mesh has pipe={parallelism.pipe.ranks}: `loss` runs all layers itself; "
            "take a mesh without pipe"
        )
    if settings.rebalance_every:
        raise ValueError(f"rebalance_every={settings.rebalance_every} needs the load of experts, which `loss` does not report")


def _check_rebalancing(every: int, config: ModelConfig, devices: int) -> None:
    """Refuses to move experts that there are not, and groups of experts that the devices would part."""
    if config.experts is None:
        raise ValueError(f"rebalance_every={every} needs a model with experts")
    balanced_order(np.ones(config.experts.num_experts), devices, num_groups(config))


def _warn_of_far_positions(config: ModelConfig, seq_len: int) -> None:
    """Warns that long documents reach positions beyond the config's. No error: training may be meant to extend a model."""
    known = config.known_positions
    if seq_len > known and is_first_process():
        _logger.warning(
            "seq_len=%d is more than the %d positions of the model (max_position_embeddings): documents of more than %d tokens "
            "are trained at positions that it has not seen; --seq-len %d cuts them there",
            seq_len, known, known, known,
        )  # fmt: skip
