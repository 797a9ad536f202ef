"""Validates a fine-tuning run (data, devices, sizes, existing checkpoints) before any weights are loaded."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.recipes.finetuning.samples import sampler_of
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.run.folder import noted_steps
from moe_jax.recipes.run.identity import identity_of, same_run, saved_run, with_weights
from moe_jax.recipes.run.loop import Begun, begin
from moe_jax.recipes.run.model import PlannedModel, plan_model
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Batches, Documents, batches, open_documents
from moe_jax.train.data.chat_templates import with_chat_template
from moe_jax.train.data.survey import Survey, survey
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
      batches: batches of `documents`; each process builds the rows of its own devices.
      held_out: batches of `held_out_documents`, which are not trained on, a micro-batch's rows each; empty without `eval_data`.
      identity: the facts that may not change between the start of the run and its resumption.
      survey: measurements of the data, in the first process of a new run; else None.
    """

    settings: FinetuneSettings
    documents: Documents
    batches: Batches
    held_out: list[dict[str, np.ndarray]]
    held_out_documents: Documents | None
    identity: dict[str, Any]
    survey: Survey | None


def prepare_run(
    settings: FinetuneSettings, model: Decoder | None, tokenizer: Any, until_end: ExitStack, loss: LossFunction | None = None
) -> tuple[PlannedRun, Begun]:
    """Returns the run that `finetune` describes, with its batches at the next one to train on; arguments and errors as there.

    If it raises, nothing has been written, except in a folder that holds a run. Otherwise the folder for checkpoints exists,
    and `until_end` holds its lock for this run.
    """
    plan = plan_run(settings, model, tokenizer)
    if loss is not None:
        _check_user_loss(loss, plan.settings, plan.config, plan.parallelism)
    identity = plan.identity | {"loss": None if loss is None else name_of(loss)}
    identity = with_weights(identity, model, settings.model)
    held_out = None if plan.held_out_documents is None else plan.held_out_documents.fingerprint
    begun = begin(plan.settings, identity, held_out, model, until_end)
    if begun.step:
        plan.batches.set_state(begun.position["data"])
        if begun.position.get("places") and plan.parallelism is not None and plan.parallelism.pipelined:
            raise ValueError(
                f"the experts of the run in {settings.output} have changed places, and in a pipe they cannot move back at the "
                "end: use a mesh without pipe"
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
    documents, held_out_documents = _open_data(settings)
    steps_done, noted = saved_run(settings.output)
    # A run that began when texts had no BOS token continues without it: else its data would differ.
    begin_texts = not noted or "begin_texts" in noted
    settings, found = _with_survey(settings, documents, tokenizer, begin_texts, resumed=steps_done > 0)

    def stream_of(documents: Documents, rows: int) -> Batches:
        own_rows = None if planned.parallelism is None else planned.parallelism.own_rows(rows)
        sizes: dict[str, Any] = dict(seq_len=settings.seq_len, batch_size=rows, rows=own_rows, seed=settings.seed)
        return batches(documents, tokenizer, **sizes, begin_texts=begin_texts, skip_bad=settings.skip_bad_documents)

    stream, held_out = stream_of(documents, settings.batch_size), []
    # Batches are built now, so that conversations that the chat template refuses are reported before minutes of loading.
    if held_out_documents is not None:
        measured = stream_of(held_out_documents, settings.rows)
        try:
            held_out = [next(measured) for _ in range(settings.eval_batches)]
        finally:
            measured.close()
    if not steps_done:
        first = stream.get_state()
        next(stream)
        stream.set_state(first)
    sampler_of(settings, documents, tokenizer)
    identity = identity_of(settings, config, tokenizer, documents.fingerprint) | ({"begin_texts": True} if begin_texts else {})
    if model is not None:
        # The dtypes of a model that was passed override the settings'.
        identity |= {"dtype": model.dtype.name, "param_dtype": jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype.name}
    if noted:
        # Starting weights are compared when they are read.
        same_run(noted | {MODEL: ""}, identity | {MODEL: ""}, Path(settings.output).expanduser())
    of_model = vars(planned) | {"tokenizer": tokenizer}
    of_data: dict[str, Any] = dict(documents=documents, held_out_documents=held_out_documents, survey=found)
    return PlannedRun(**of_model, settings=settings, batches=stream, held_out=held_out, identity=identity, **of_data)


def _open_data(settings: FinetuneSettings) -> tuple[Documents, Documents | None]:
    """Opens the data of a run, and the held-out data, if any.

    Raises:
      ValueError, FileNotFoundError, ImportError: as `open_documents`. Or held-out text is also trained on, or has another
        format.
    """
    names = "learned_answers", "empty_thinking"
    options: dict[str, Any] = {name: getattr(settings, name) for name in names} | dict(skip_bad=settings.skip_bad_documents)
    documents = open_documents(settings.data, settings.data_format, **options)
    if settings.eval_data is None:
        return documents, None
    held_out = open_documents(settings.eval_data, settings.data_format, **options)
    _check_held_out(held_out, documents, settings)
    if held_out.bad and is_first_process():
        _logger.warning("left out of the held-out data: %s", held_out.bad)
    return documents, held_out


def _with_survey(
    settings: FinetuneSettings, documents: Documents, tokenizer: Any, begin_texts: bool, *, resumed: bool
) -> tuple[FinetuneSettings, Survey | None]:
    """Returns the settings with `epochs` turned into `steps`, and the survey of the data if one was made.

    Raises:
      ValueError: `epochs` of a stream.
    """
    options: dict[str, Any] = dict(seq_len=settings.seq_len, seed=settings.seed, begin_texts=begin_texts)
    options |= dict(skip_bad=settings.skip_bad_documents)
    if documents.is_stream and settings.epochs is not None:
        raise ValueError(
            f"epochs={settings.epochs} needs the number of documents, which a stream does not tell: give steps, or take=N in "
            "place of stream=true"
        )
    if settings.epochs is None:
        begins_here = is_first_process() and not resumed
        return settings, survey(documents, tokenizer, **options) if begins_here else None
    steps, found = noted_steps(Path(settings.output).expanduser(), settings.epochs) if resumed else None, None
    if steps is None:
        # All documents are measured: the number of steps must be the same each time, and in each process.
        found = survey(documents, tokenizer, **options, max_documents=None, max_seconds=None)
        steps = found.steps(settings.epochs, settings.batch_size)
    return replace(settings, steps=steps, epochs=None), found


def _check_held_out(held_out: Documents, documents: Documents, settings: FinetuneSettings) -> None:
    """Refuses held-out text in another format than the data, and text that is also trained on."""
    if held_out.format != documents.format and documents.format != "mixed":
        raise ValueError(
            f"eval_data={settings.eval_data!r} has the format {held_out.format}, and data={settings.data!r} "
            f"{documents.format}: their losses could not be compared; use one format"
        )
    both = _names(documents) & _names(held_out)
    if both or held_out.fingerprint == documents.fingerprint:
        raise ValueError(
            f"eval_data={settings.eval_data!r} must not be trained on, but data={settings.data!r} has "
            + (f"{min(both)} too" if both else "the same contents")
        )


def _names(documents: Documents) -> set[str]:
    """Returns the files, and the splits of the hub, that documents come from."""
    return {reader.name if reader.path is None else str(reader.path.resolve()) for reader in documents.readers}


def _check_user_loss(
    loss: LossFunction, settings: FinetuneSettings, config: ModelConfig, parallelism: Parallelism | None = None
) -> None:
    """Refuses a user's loss together with the built-in loss's coefficients, rebalancing, a pipe, or MTP modules."""
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
            "use a mesh without pipe"
        )
    if settings.rebalance_every:
        raise ValueError(f"rebalance_every={settings.rebalance_every} needs the load of experts, which `loss` does not report")


def _check_rebalancing(every: int, config: ModelConfig, devices: int) -> None:
    """Refuses rebalancing for a model without experts, or if devices would split a group of experts."""
    if config.experts is None:
        raise ValueError(f"rebalance_every={every} needs a model with experts")
    balanced_order(np.ones(config.experts.num_experts), devices, num_groups(config))


def _warn_of_far_positions(config: ModelConfig, seq_len: int) -> None:
    """Warns that long documents reach positions beyond the config's. No error: training may extend a model."""
    known = config.known_positions
    if seq_len > known and is_first_process():
        _logger.warning(
            "seq_len=%d is more than the %d positions of the model (max_position_embeddings): documents of more than %d tokens "
            "are trained at positions that it has not seen; --seq-len %d cuts them there",
            seq_len, known, known, known,
        )  # fmt: skip
