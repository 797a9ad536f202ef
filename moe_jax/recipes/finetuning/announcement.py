"""The announcement of a run: its data and its length, printed before it starts."""

from moe_jax.parallel.pipeline.chunks import layers_of_chunk
from moe_jax.recipes.finetuning.prepare import PlannedRun
from moe_jax.recipes.run.best import told_held_out
from moe_jax.train.data.report import describe_sources, describe_tokens, kind_of
from moe_jax.train.data.survey import Survey

MANY_EPOCHS = 100
"""A run with more passes through its data than this gets a warning: it is probably a mistake."""


def announcement(run: PlannedRun, steps_done: int) -> str:
    """Returns a few lines: tokens, learned share, padding and cuts (if the data was surveyed), steps and epochs."""
    settings, found = run.settings, run.survey
    steps = (
        f"steps {steps_done + 1} to {settings.steps}, {settings.batch_size} x {settings.seq_len} tokens a step on "
        f"{run.devices} device{'s' if run.devices > 1 else ''}{_pipe(run)}"
    )
    if steps_done >= settings.steps:
        steps = f"all {settings.steps} steps are taken: nothing is left to do"
    lines = []
    if settings.force_balanced_routing:
        lines.append("FORCED BALANCED ROUTING: the router is ignored. For benchmarks only; do not use the resulting model.")
    if run.lora is not None:
        lines.append(str(run.lora))
    held_out = run.held_out_documents
    if held_out is not None:
        number = None if held_out.is_stream else len(held_out)
        lines.append(told_held_out(settings, number, kind_of(held_out)))
    if found is None:
        kind = kind_of(run.documents)
        return "\n".join(
            [*lines, f"{f'a stream of {kind}' if run.documents.is_stream else f'{len(run.documents)} {kind}'}; {steps}"]
        )
    lines += describe_sources(run.documents.surveyed, found, run.tokenizer.chat_template)
    lines += describe_tokens(run.documents, found, settings.seq_len)
    if run.documents.is_stream:
        return "\n".join([*lines, steps])
    lines.append(f"{steps}: {_number(_epochs(run, found))} epochs")
    if _epochs(run, found) > MANY_EPOCHS:
        three = found.steps(3, settings.batch_size)
        lines.append(
            f"WARNING: each document would be learned {_number(_epochs(run, found))} times. Give fewer steps, or --epochs: 3 "
            f"epochs are {three} step{'s' if three > 1 else ''}"
        )
    return "\n".join(lines)


def _pipe(run: PlannedRun) -> str:
    """Describes the pipeline of the run; empty without one."""
    if run.parallelism is None or not run.parallelism.pipelined:
        return ""
    (ranks, chunks), layers = run.parallelism.pipe, run.config.num_hidden_layers
    of_chunk = layers_of_chunk(layers, ranks, chunks)
    empty = ranks * chunks * of_chunk - layers
    return (
        f", a pipe of {ranks} ranks with {chunks} chunk{'s' if chunks > 1 else ''} of {of_chunk} "
        f"layer{'s' if of_chunk > 1 else ''}{f' ({empty} of {ranks * chunks * of_chunk} places are empty)' if empty else ''}"
    )


def _epochs(run: PlannedRun, found: Survey) -> float:
    return found.epochs(run.settings.steps, run.settings.batch_size)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.2g}"
