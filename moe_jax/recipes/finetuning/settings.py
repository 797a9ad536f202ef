"""The settings of a fine-tuning run, checked as a whole before anything happens."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from moe_jax.adapters.settings import LoraSettings
from moe_jax.models.precision import DenseGroup, PrecisionName
from moe_jax.parallel.choices import MESH_AXES, UNIFORM, Hops, MeshShape, PipeSchedule
from moe_jax.parallel.expert.settings import ExpertParallel
from moe_jax.parallel.pipeline.limits import ranks_problem, schedule_problem
from moe_jax.recipes.finetuning.best import best_problems
from moe_jax.recipes.finetuning.lora_settings import (
    Weights,
    default_learning_rate,
    default_param_dtype,
    lora_problems,
    weights_problems,
)
from moe_jax.recipes.finetuning.precision import dense_problems, precision_problems
from moe_jax.recipes.finetuning.trackers import Tracker, log_problems
from moe_jax.train.data.chat_templates import TEMPLATES
from moe_jax.train.data.files import FORMATS
from moe_jax.train.data.reasoning import EMPTY_THINKING
from moe_jax.train.data.records import LEARNED_ANSWERS
from moe_jax.train.data.sources import sources

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class FinetuneSettings:
    """Fine-tune a model on texts or chats. The same command continues an interrupted run.

    moe-jax finetune --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/mine --seq-len 4096 --steps 1000

    The settings of `recipes.finetune`; wrong values raise a ValueError that lists them.

    Attributes:
      model: a checkpoint folder or hub id.
      data: a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a folder of such files or of text files. Or the id of a
        data set of the hub. Several sources are mixed. Options stand behind commas: chats.jsonl,weight=0.7 or
        owner/name,split=train_sft,take=1000 (docs/data.md).
      output: the folder for metrics and checkpoints. A run that finds checkpoints there continues from the last one.
      eval_data: held-out text to measure the loss on, a source in the same format as `data`; None: no measurement. A file that
        is also in `data` is refused.
      eval_every: steps between two measurements of the held-out loss; the last step is always measured.
      eval_batches: batches in a measurement, each with a micro-batch's rows. `seed` draws them; they are the same each time.
      keep_best: keep the checkpoint with the smallest held-out loss beside the newest ones, and end with its weights. Each
        improvement writes a checkpoint. May be changed when a run continues, as all settings down to `log_to`.
      early_stop: end the run after this number of measurements of the held-out loss without an improvement; 0: never.
      sample_prompts: texts, or files with a prompt a line, which the model continues during the run; for chats, questions that
        it answers. The most likely token is taken each time. Results are printed, and stand in output/samples.jsonl.
      sample_every: steps between two samples; the last step always has one.
      sample_tokens: the most tokens of a sample.
      log_every: steps between two lines on the console. The first and the last step and each measurement of held-out text
        always have one, and metrics.jsonl has every step. None: 1, 2, 5, 10, 20 and so on, for 50 to 125 lines a run.
      log_to: further places for the log, any of tensorboard (output/tensorboard), wandb and trackio. The two send scalars and
        settings to their servers; each is a package to install.
      data_format: "folder" (each file is a text), "text", "chat" (messages), "sharegpt", "alpaca", or "auto": keys decide.
        Or "pairs" (prompt and completion as a chat), or "continuation" (both as plain texts).
      learned_answers: the assistant's answers that are learned, "all", or "last": those of a conversation's last turn.
      empty_thinking: "learn", or "mask": the empty think block that a template writes into an answer without reasoning is left
        out of the loss.
      skip_bad_documents: leave out bad rows, and conversations that the chat template refuses, and count them in the log.
        Otherwise bad rows are listed before the run starts, and the first refused conversation ends it. May be changed when a
        run continues.
      tokenizer: a folder or hub id; None: the model's.
      chat_template: a Jinja file to use in place of the tokenizer's template, or "chatml", "deepseek-v3", "deepseek-r1",
        "kimi-k2" or "kimi-k2-thinking"; saved with the trained model.
      seq_len: tokens in a row. Documents are packed into rows; longer documents are cut. More than the model's
        max_position_embeddings (extended by yarn, if the model has it) gives a warning, and the run goes on.
      batch_size: rows in an optimizer step, over all micro-batches.
      gradient_accumulation: micro-batches in an optimizer step.
      steps: total number of optimizer steps. Run the command again with a larger value to continue a run that has ended.
      epochs: passes through the data, in place of `steps`; all documents are tokenized once to count the steps.
      learning_rate: the peak, reached after `warmup_steps`; afterwards the rate falls along a cosine. None: 1e-5, and 1e-4 with
        lora: adapters want about ten times as much.
      min_learning_rate_ratio: the learning rate at the end, as a part of the peak.
      warmup_steps: steps in which the learning rate rises to its peak; None: a tenth of `steps`, at most 100.
      weight_decay: AdamW's weight decay; norms and biases do not decay.
      max_grad_norm: gradients with a larger norm are scaled down to it.
      aux_loss_coef: the load-balancing loss's coefficient; None: the config's router_aux_loss_coef.
      sequence_loss_coef: the coefficient of the balance loss within each sequence. None: the config's aux_loss_alpha if its
        seq_aux is set (DeepSeek), else 0.
      z_loss_coef: the router z-loss's coefficient.
      expert_bias_update_rate: the step by which the biases of experts move, for models that balance their load by biases; 0:
        the biases stay. With lora they stay too: an adapter's file cannot hold them.
      mtp_loss_coef: the coefficient of the further tokens' loss, for models with modules that predict them (DeepSeek-V3 was
        pretrained with 0.3, at the end 0.1). 0, or lora: the modules are left out of the run and of the trained model.
      seed: decides the order of documents.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep_checkpoints: the number of newest checkpoints to keep.
      dtype: the dtype that the model computes in, "bfloat16" or "float32".
      param_dtype: the dtype of parameters, and of their gradients within a micro-batch, "float32" or "bfloat16". Masters are
        float32 in either case: a bfloat16 parameter is the upper half of its master, so that no pass casts it. None: float32.
        With lora these are the frozen weights, without gradients and masters, and None is `dtype`.
      moment_dtype: the dtype of AdamW's two moments between steps, "float32", or "bfloat16" for half the memory.
      remat: recompute each layer in the backward pass: less memory, about a third more time.
      offload: keep the input of each layer, which remat needs, in the host's memory: for long sequences (docs/scaling.md).
      lora: train adapters beside the model's weights, which stay as they are (docs/adapters.md). The run's folder gets the
        adapter in place of a model. None: train all parameters.
      weights: the form of the weights beside adapters: "whole", "as stored" for a checkpoint in FP8, or experts in "nf4" or
        "fp8" (docs/adapters.md).
      precision: "fp8" multiplies the experts in 8 bits, forward and for the gradients of their inputs; "fp8_kept" also keeps
        their activations so (docs/fp8.md). "bf16": in `dtype`. A pipe must have the schedule "uniform".
      fp8_dense: with precision "fp8", dense matrices that multiply in 8 bits too: attention (its projections), shared_experts,
        mlp (dense layers). See docs/fp8.md.
      mesh: the numbers of devices over which rows, parameters, experts and sequences are spread (docs/scaling.md). All devices
        are used.
      pipe_chunks: the parts of consecutive layers that each rank of mesh.pipe holds. More chunks wait less and send more
        (docs/schedules.md). A mesh.pipe of 2 or more needs gradient_accumulation, best a multiple of mesh.pipe from four times
        on. May be changed, as mesh, when a run continues.
      pipe_schedule: the order of the passes in mesh.pipe (docs/schedules.md). May be changed when a run continues.
      shard_optimizer: split AdamW's moments and the masters over mesh.data too (ZeRO, stage 1); parameters stay whole there.
        Needs a mesh.data of 2 or more. May be changed when a run continues.
      capacity_factor: the room of one exchange between experts' devices, as a multiple of an even routing's tokens. With the
        number of devices along mesh.expert every routing fits, and no layer waits to learn whether its tokens fit
        (docs/parallel_experts.md).
      hops: how gathered matrices, the ring along mesh.context and pairwise exchanges with experts travel between devices.
        "copies" are peer-to-peer copies between the GPUs of one process; "nccl" are collectives. None: copies if they can be
        made.
      overlap_micro_batches: compute each micro-batch forward beside the backward pass of the one before, so that the exchange
        with experts of other devices hides (docs/scaling.md). None: where experts lie on several devices and remat is on. With
        a loss of your own, only False and None. Changes the order of sums, and so the last bits of a run. A pipe always
        computes so.
      shadow_experts: the most experts that a layer may copy to all devices along mesh.expert for a step. A layer does so if the
        busiest device saves more than the copies cost (docs/parallel_experts.md).
      tokens_in_fp8: send tokens to the experts of other devices in FP8, for half the bytes (docs/fp8.md). Needs a precision in
        FP8, and a mesh.expert of 2 or more. May be changed when a run continues.
      rebalance_every: steps after which experts change places between the devices along mesh.expert, by their load since the
        last change; 0: never. The log and the trained model keep the experts' old numbers. The load-balancing loss of
        several layers counts experts by their places (docs/scaling.md).
      tensorboard: write output/tensorboard too.
      force_balanced_routing: ignore the router's choices and deal experts out in turn. For benchmarks: it spoils a model.
      dry_run: check everything, and print the data that the run would learn from, with a row of its first batch. Train nothing,
        read no weights, and write no file.
      find_learning_rate: take up to 100 steps at rising learning rates in place of the run, print the losses, and suggest a
        rate (docs/finetuning.md). Writes output/learning_rate alone.
    """

    model: str
    data: str | tuple[str, ...]
    output: str
    eval_data: str | None = None
    eval_every: int = 100
    eval_batches: int = 8
    keep_best: bool = False
    early_stop: int = 0
    sample_prompts: tuple[str, ...] = ()
    sample_every: int = 100
    sample_tokens: int = 64
    log_every: int | None = None
    log_to: tuple[Tracker, ...] = ()
    data_format: str = "auto"
    learned_answers: str = "all"
    empty_thinking: str = "learn"
    skip_bad_documents: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    seq_len: int = 4096
    batch_size: int = 8
    gradient_accumulation: int = 1
    steps: int = 1000
    epochs: float | None = None
    learning_rate: float | None = None
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    aux_loss_coef: float | None = None
    sequence_loss_coef: float | None = None
    z_loss_coef: float = 0.0
    expert_bias_update_rate: float = 0.001
    mtp_loss_coef: float = 0.1
    seed: int = 0
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    dtype: str = "bfloat16"
    param_dtype: str | None = None
    moment_dtype: str = "float32"
    remat: bool = True
    offload: bool = False
    lora: LoraSettings | None = None
    weights: Weights = "whole"
    precision: PrecisionName = "bf16"
    fp8_dense: tuple[DenseGroup, ...] = ()
    mesh: MeshShape = MeshShape()
    pipe_chunks: int = 1
    pipe_schedule: PipeSchedule = "uniform"
    shard_optimizer: bool = False
    capacity_factor: float = ExpertParallel.capacity_factor
    hops: Hops | None = None
    overlap_micro_batches: bool | None = None
    shadow_experts: int = 0
    tokens_in_fp8: bool = False
    rebalance_every: int = 0
    tensorboard: bool = False
    force_balanced_routing: bool = False
    dry_run: bool = False
    find_learning_rate: bool = False

    def __post_init__(self):
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", default_learning_rate(self.lora))
        if self.param_dtype is None:
            object.__setattr__(self, "param_dtype", default_param_dtype(self.lora, self.dtype))
        problems = _problems(self)
        if problems:
            raise ValueError("FinetuneSettings: " + "; ".join(problems))

    @property
    def mtp(self) -> bool:
        """True if modules that predict further tokens are trained. No adapter's file can hold them."""
        return self.mtp_loss_coef > 0 and self.lora is None


def _problems(settings: FinetuneSettings) -> list[str]:
    """Returns the problems of the settings, one clause each."""
    problems = []
    wanted = {
        "a string that is not empty": ("model", "output"),
        "an integer of at least 1": (
            "batch_size",
            "gradient_accumulation",
            "steps",
            "checkpoint_every",
            "keep_checkpoints",
            "eval_every",
            "eval_batches",
            "pipe_chunks",
            "sample_every",
            "sample_tokens",
            "log_every",
        ),
        "an integer of at least 2": ("seq_len",),
        "an integer of at least 0": ("warmup_steps", "early_stop", "shadow_experts", "rebalance_every"),
        "an integer from 0 to 2**32 - 1": ("seed",),
        "a number greater than 0": ("epochs", "learning_rate", "max_grad_norm", "capacity_factor"),
        "a number of at least 0": (
            "weight_decay",
            "aux_loss_coef",
            "sequence_loss_coef",
            "z_loss_coef",
            "mtp_loss_coef",
            "expert_bias_update_rate",
        ),
        "a number from 0 to 1": ("min_learning_rate_ratio",),
    }
    for want, names in wanted.items():
        for name in names:
            value = getattr(settings, name)
            if name in ("epochs", "warmup_steps", "aux_loss_coef", "sequence_loss_coef", "log_every") and value is None:
                continue
            if not _fits(value, want):
                problems.append(f"{name}={value!r} must be {want}")
    one_of = dict(data_format=FORMATS, learned_answers=LEARNED_ANSWERS, empty_thinking=EMPTY_THINKING)
    one_of |= dict(dtype=DTYPES, param_dtype=DTYPES, moment_dtype=DTYPES)
    for name, choices in one_of.items():
        if getattr(settings, name) not in choices:
            problems.append(f"{name}={getattr(settings, name)!r} must be one of {', '.join(choices)}")
    if settings.offload and not settings.remat:
        problems.append("offload=True needs remat: without remat a layer keeps far more than its input")
    if settings.rebalance_every and settings.force_balanced_routing:
        problems.append(
            "rebalance_every needs the router's own choices: force_balanced_routing deals experts out by their places"
        )
    if settings.hops not in (None, *get_args(Hops)):
        problems.append(f"hops={settings.hops!r} must be one of {', '.join(get_args(Hops))}, or None")
    if settings.overlap_micro_batches not in (None, True, False):
        problems.append(f"overlap_micro_batches={settings.overlap_micro_batches!r} must be True, False or None")
    for axis in MESH_AXES:
        if not _fits(getattr(settings.mesh, axis), "an integer of at least 1"):
            problems.append(f"mesh.{axis}={getattr(settings.mesh, axis)!r} must be an integer of at least 1")
    if problems:
        return problems
    if settings.batch_size % settings.gradient_accumulation:
        problems.append(
            f"batch_size={settings.batch_size} must be a multiple of gradient_accumulation={settings.gradient_accumulation}"
        )
    if settings.overlap_micro_batches and (settings.gradient_accumulation == 1 or settings.mesh.size == 1):
        problems.append(
            "overlap_micro_batches=True needs gradient_accumulation of at least 2 and a mesh of several devices: on one device "
            "no exchange could hide"
        )
    problems += pipe_problems(settings, settings.mesh.pipe)
    problems += lora_problems(settings.lora, asdict(settings.mesh), settings.shard_optimizer)
    problems += weights_problems(settings.weights, settings.lora, settings.mesh.size)
    if settings.lora is not None and settings.lora.dropout and settings.overlap_micro_batches:
        problems.append("overlap_micro_batches=True needs adapters without dropout: leave lora.dropout out")
    of_weights = settings.pipe_schedule, settings.lora, settings.weights
    problems += precision_problems(settings.precision, settings.dtype, *of_weights, tokens_in_fp8=settings.tokens_in_fp8)
    problems += dense_problems(settings.fp8_dense, settings.precision)
    if settings.pipe_chunks > 1 and settings.mesh.pipe == 1:
        problems.append(f"pipe_chunks={settings.pipe_chunks} needs a mesh.pipe of 2 or more")
    if settings.mesh.pipe == 1 and (problem := ranks_problem(settings.pipe_schedule, 1, 1)):
        problems.append(problem)
    rows = settings.batch_size // settings.gradient_accumulation
    ways = settings.mesh.size // (settings.mesh.context * settings.mesh.pipe)
    if rows % ways:
        problems.append(f"a micro-batch of {rows} rows cannot be divided among data x fsdp x expert = {ways} devices")
    if settings.mesh.context > 1 and settings.seq_len % (2 * settings.mesh.context):
        problems.append(f"seq_len={settings.seq_len} must be a multiple of 2 * mesh.context = {2 * settings.mesh.context}")
    if settings.epochs is not None and settings.steps != FinetuneSettings.steps:
        problems.append(f"epochs={settings.epochs} and steps={settings.steps} exclude each other: give one of them")
    if settings.epochs is None and settings.warmup_steps is not None and settings.warmup_steps > settings.steps:
        problems.append(f"warmup_steps={settings.warmup_steps} must not exceed steps={settings.steps}")
    template = settings.chat_template
    if template not in (None, *TEMPLATES) and not Path(str(template)).expanduser().is_file():
        problems.append(f"chat_template={template!r} is no file; give a Jinja file, or one of {', '.join(TEMPLATES)}")
    output = Path(settings.output).expanduser()
    problems += _data_problems("data", settings.data, settings.output)
    problems += [] if settings.eval_data is None else _data_problems("eval_data", settings.eval_data, settings.output)
    for name, path in (("model", settings.model), ("tokenizer", settings.tokenizer)):
        folder = None if path is None else Path(path).expanduser()
        if folder is not None and folder.is_dir() and _is_replaced(folder.resolve(), output):
            problems.append(
                f"{name}={path!r} must lie outside of output={settings.output!r}, where the run writes its own files and "
                "replaces model/: copy it elsewhere, or give another output"
            )
    problems += log_problems(settings.tensorboard, settings.log_to)
    if settings.dry_run and settings.find_learning_rate:
        problems.append("dry_run=True and find_learning_rate=True exclude each other: give one of them")
    problems += best_problems(settings)
    if output.is_file():
        problems.append(f"output={settings.output!r} is a file; it must be a folder")
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
                f"output={output!r} must lie outside of {name}={source.path!r}, or the run reads what it wrote as text"
            )
    return problems


def pipe_problems(settings: FinetuneSettings, ranks: int) -> list[str]:
    """Returns the settings that do not fit a run through a pipe of `ranks` ranks, one clause each; none for one rank."""
    if ranks == 1:
        return []
    problems = []
    if settings.gradient_accumulation == 1:
        problems.append(
            f"mesh.pipe={ranks} needs a gradient_accumulation of 2 or more: with one micro-batch all ranks but one wait. "
            f"Take a multiple of {ranks}, at best {4 * ranks} or more"
        )
    name, axes = settings.pipe_schedule, {**asdict(settings.mesh), "pipe": ranks}
    if settings.gradient_accumulation > 1 and (
        problem := schedule_problem(name, axes, settings.pipe_chunks, settings.gradient_accumulation)
    ):
        problems.append(problem)
    elif name not in UNIFORM and settings.offload:
        problems.append(f"offload=True needs pipe_schedule='uniform': slots of {name!r} lie in the GPU's memory")
    if settings.sample_prompts:
        problems.append("sample_prompts need a mesh without pipe: models in a pipe generate no text")
    if settings.rebalance_every:
        problems.append(
            f"rebalance_every={settings.rebalance_every} needs a mesh without pipe: experts cannot change places in one yet"
        )
    return problems


def _is_replaced(folder: Path, output: Path) -> bool:
    """Tells if `folder` is the output folder, or lies in the folder of the trained model, which the run replaces at its end."""
    # Imported here: this module asks JAX which process it is, and settings are read without JAX.
    from moe_jax.checkpoint.folders import previous_of

    model = (output / "model").resolve()
    return folder == output.resolve() or any(
        folder.is_relative_to(place) for place in (model, model.with_name(f".{model.name}.incomplete"), previous_of(model))
    )


def _fits(value, want: str) -> bool:
    if want.startswith("a string"):
        return bool(str(value))
    if isinstance(value, bool) or not isinstance(value, int if want.startswith("an integer") else int | float):
        return False
    bounds = {
        "an integer of at least 1": value >= 1,
        "an integer of at least 2": value >= 2,
        "an integer from 0 to 2**32 - 1": 0 <= value < 2**32,
        "a number greater than 0": 0 < value < float("inf"),
        "a number from 0 to 1": 0 <= value <= 1,
    }
    return bounds.get(want, 0 <= value < float("inf"))
