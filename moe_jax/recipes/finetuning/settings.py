"""The settings of a fine-tuning run, checked as a whole before anything happens."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_jax.parallel.choices import UNIFORM, PipeSchedule
from moe_jax.parallel.pipeline.limits import ranks_problem, schedule_problem
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.train.data.chat_templates import TEMPLATES
from moe_jax.train.data.layouts import LEARNED_ANSWERS
from moe_jax.train.data.sources import FORMATS, sources
from moe_jax.train.data.turns import EMPTY_THINKING


@dataclass(frozen=True)
class FinetuneSettings(RunSettings):
    """Fine-tune a model on texts or chats. The same command continues an interrupted run.

    moe-jax finetune --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/mine --seq-len 4096 --steps 1000

    The settings of `recipes.finetune`; wrong values raise a ValueError that lists them.

    Attributes:
      data: a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a folder of such files or of text files. Or the id of a
        data set of the hub. Several sources are mixed. Options follow after commas: chats.jsonl,weight=0.7 or
        owner/name,split=train_sft,take=1000 (docs/data.md).
      eval_data: held-out text to measure the loss on, a source in the same format as `data`; None: no measurement. A file that
        is also in `data` is refused.
      sample_prompts: texts, or files with one prompt per line, which the model continues during the run; for chats, questions
        that it answers. Decoding is greedy. Results are printed and written to output/samples.jsonl.
      sample_every: steps between two samples; the last step always has one.
      sample_tokens: maximum number of tokens of a sample.
      data_format: "folder" (each file is a text), "text", "chat" (messages), "sharegpt", "alpaca", or "auto": keys decide.
        Or "pairs" (prompt and completion as a chat), or "continuation" (both as plain texts).
      learned_answers: the assistant's answers that are learned: "all", or "last" for a conversation's last turn only.
      empty_thinking: "learn", or "mask": the empty think block that a template writes into an answer without reasoning is left
        out of the loss.
      skip_bad_documents: leave out bad rows, and conversations that the chat template refuses, and count them in the log.
        Otherwise bad rows are listed before the run starts, and the first refused conversation ends it. May be changed when a
        run continues.
      chat_template: a Jinja file to use instead of the tokenizer's template, or "chatml", "deepseek-v3", "deepseek-r1",
        "kimi-k2" or "kimi-k2-thinking"; saved with the trained model.
      seq_len: tokens in a row. Documents are packed into rows; longer documents are cut. More than the model's
        max_position_embeddings (extended by yarn, if the model has it) only prints a warning.
      batch_size: rows in an optimizer step, over all micro-batches.
      learning_rate: the peak, reached after `warmup_steps`; afterwards the rate falls along a cosine. None: 1e-5, and 1e-4 with
        lora: adapters need about ten times as much.
      aux_loss_coef: the load-balancing loss's coefficient; None: the config's router_aux_loss_coef.
      sequence_loss_coef: the coefficient of the balance loss within each sequence. None: the config's aux_loss_alpha if its
        seq_aux is set (DeepSeek), else 0.
      z_loss_coef: the router z-loss's coefficient.
      expert_bias_update_rate: the amount by which a step changes the biases of experts, for models that balance their load by
        biases; 0: the biases stay. With lora they always stay: an adapter's file cannot hold them.
      mtp_loss_coef: the coefficient of the multi-token prediction loss, for models with such modules (DeepSeek-V3 was
        pretrained with 0.3, at the end 0.1). 0, or lora: the modules are left out of the run and of the trained model.
      seed: decides the order of documents.
      pipe_chunks: the parts of consecutive layers that each rank of mesh.pipe holds. More chunks wait less and send more
        (docs/schedules.md). A mesh.pipe of 2 or more needs gradient_accumulation, best a multiple of mesh.pipe from four times
        on. May be changed, as mesh, when a run continues.
      pipe_schedule: the order of the passes in mesh.pipe (docs/schedules.md). May be changed when a run continues.
      overlap_micro_batches: compute each micro-batch's forward pass together with the previous one's backward pass, to hide the
        exchange with experts on other devices (docs/scaling.md). None: if experts are on several devices and remat is on. With
        your own loss, only False and None. Changes the order of sums, and so the last bits of a run. A pipe always overlaps.
      rebalance_every: steps after which experts change places between the devices along mesh.expert, by their load since the
        last change; 0: never. The log and the trained model keep the experts' old numbers. The load-balancing loss of
        several layers counts experts by their places (docs/scaling.md).
      force_balanced_routing: ignore the router's choices and assign experts in turn. For benchmarks: it ruins a model.
      dry_run: check everything, and print the data that the run would learn from, with a row of its first batch. Train nothing,
        read no weights, and write no file.
      find_learning_rate: instead of the run, train up to 100 steps at rising learning rates, print the losses, and suggest a
        rate (docs/finetuning.md). Writes only output/learning_rate.
    """

    data: str | tuple[str, ...]
    sample_prompts: tuple[str, ...] = ()
    sample_every: int = 100
    sample_tokens: int = 64
    data_format: str = "auto"
    learned_answers: str = "all"
    empty_thinking: str = "learn"
    skip_bad_documents: bool = False
    chat_template: str | None = None
    aux_loss_coef: float | None = None
    sequence_loss_coef: float | None = None
    z_loss_coef: float = 0.0
    expert_bias_update_rate: float = 0.001
    mtp_loss_coef: float = 0.1
    pipe_chunks: int = 1
    pipe_schedule: PipeSchedule = "uniform"
    overlap_micro_batches: bool | None = None
    rebalance_every: int = 0
    force_balanced_routing: bool = False
    find_learning_rate: bool = False

    WANTED: ClassVar[Mapping[str, str]] = {
        **RunSettings.WANTED,
        **dict.fromkeys(("pipe_chunks", "sample_every", "sample_tokens"), "an integer of at least 1"),
        "rebalance_every": "an integer of at least 0",
        **dict.fromkeys(
            ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef", "mtp_loss_coef", "expert_bias_update_rate"),
            "a number of at least 0",
        ),
    }
    ONE_OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "data_format": FORMATS,
        "learned_answers": LEARNED_ANSWERS,
        "empty_thinking": EMPTY_THINKING,
        **RunSettings.ONE_OF,
    }
    MAY_BE_NONE: ClassVar[tuple[str, ...]] = (*RunSettings.MAY_BE_NONE, "aux_loss_coef", "sequence_loss_coef")
    OF_EXPERT_DEVICES: ClassVar[tuple[str, ...]] = (*RunSettings.OF_EXPERT_DEVICES, "rebalance_every")
    RESUME_MUST_MATCH: ClassVar[tuple[str, ...]] = (
        *RunSettings.RESUME_MUST_MATCH,
        *("aux_loss_coef", "sequence_loss_coef", "z_loss_coef", "expert_bias_update_rate", "mtp_loss_coef"),
        "force_balanced_routing",
    )

    @property
    def mtp(self) -> bool:
        """True if multi-token prediction modules are trained. An adapter's file cannot hold them."""
        return self.mtp_loss_coef > 0 and self.lora is None

    @property
    def order_of_passes(self) -> dict[str, Any]:
        """The options of a `Parallelism` for the order of micro-batches, and for a pipe."""
        names = "overlap_micro_batches", "pipe_chunks", "pipe_schedule"
        return {name: getattr(self, name) for name in names}

    def values_problems(self) -> list[str]:
        """Adds to the problems of `RunSettings`: options that exclude each other, and `overlap_micro_batches`."""
        problems = super().values_problems()
        if self.rebalance_every and self.force_balanced_routing:
            problems.append(
                "rebalance_every needs the router's own choices: force_balanced_routing deals experts out by their places"
            )
        if self.overlap_micro_batches not in (None, True, False):
            problems.append(f"overlap_micro_batches={self.overlap_micro_batches!r} must be True, False or None")
        return problems

    def problems(self) -> list[str]:
        """Adds to the problems of `RunSettings`: settings that contradict the order of passes or the data."""
        problems = super().problems()
        if self.overlap_micro_batches and (self.gradient_accumulation == 1 or self.mesh.size == 1):
            problems.append(
                "overlap_micro_batches=True needs gradient_accumulation of at least 2 and a mesh of several devices: on one "
                "device no exchange could hide"
            )
        if self.lora is not None and self.overlap_micro_batches:
            problems.append("overlap_micro_batches=True is for runs without lora, whose micro-batches run in turn")
        if self.pipe_chunks > 1 and self.mesh.pipe == 1:
            problems.append(f"pipe_chunks={self.pipe_chunks} needs a mesh.pipe of 2 or more")
        if self.mesh.pipe == 1 and (problem := ranks_problem(self.pipe_schedule, 1, 1)):
            problems.append(problem)
        template = self.chat_template
        if template not in (None, *TEMPLATES) and not Path(str(template)).expanduser().is_file():
            problems.append(f"chat_template={template!r} is no file; give a Jinja file, or one of {', '.join(TEMPLATES)}")
        problems += _data_problems("data", self.data, self.output)
        problems += [] if self.eval_data is None else _data_problems("eval_data", self.eval_data, self.output)
        if self.dry_run and self.find_learning_rate:
            problems.append("dry_run=True and find_learning_rate=True exclude each other: give one of them")
        return problems

    def pipe_problems(self, ranks: int) -> list[str]:
        """Returns the settings that contradict a pipe of `ranks` ranks, one clause each; none for one rank."""
        if ranks == 1:
            return []
        problems = []
        if self.gradient_accumulation == 1:
            problems.append(
                f"mesh.pipe={ranks} needs a gradient_accumulation of 2 or more: with one micro-batch all ranks but one wait. "
                f"Take a multiple of {ranks}, at best {4 * ranks} or more"
            )
        name, axes = self.pipe_schedule, {**asdict(self.mesh), "pipe": ranks}
        expert = self.expert_parallel.over(self.mesh.expert, self.hops or "nccl")
        if self.gradient_accumulation > 1 and (
            problem := schedule_problem(
                name, axes, self.pipe_chunks, self.gradient_accumulation, expert, frozen=self.lora is not None
            )
        ):
            problems.append(problem)
        elif name not in UNIFORM and self.offload:
            problems.append(f"offload=True needs pipe_schedule='uniform': slots of {name!r} stay in the GPU's memory")
        if not isinstance(self.remat, bool) and self.remat != "auto":
            problems.append(f"remat={self.remat} needs a mesh without pipe: give remat=True or remat=False")
        if self.weights != "whole":
            problems.append(f"weights={self.weights!r} needs a mesh without pipe, which holds whole matrices: give 'whole'")
        if self.sample_prompts:
            problems.append("sample_prompts need a mesh without pipe: models in a pipe generate no text")
        if self.rebalance_every:
            problems.append(
                f"rebalance_every={self.rebalance_every} needs a mesh without pipe: experts cannot change places in one yet"
            )
        return problems


def _data_problems(name: str, data: str | tuple[str, ...], output: str) -> list[str]:
    """Returns the problems of the sources of `data` or `eval_data`, one clause each."""
    try:
        found = sources(data)
    except ValueError as error:
        return [f"{name}={data!r}: {error}"]
    problems = []
    for source in found:
        path = Path(source.path).expanduser()
        if not source.path or not (path.exists() or source.on_hub):
            problems.append(f"{name}={source.path!r} does not exist")
        elif path.exists() and Path(output).expanduser().resolve().is_relative_to(path.resolve()):
            problems.append(
                f"output={output!r} must be outside of {name}={source.path!r}, or the run reads what it wrote as text"
            )
    return problems
