"""The settings that every run has, with their checks. They need no JAX to import."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from moe_jax.adapters.settings import LoraSettings
from moe_jax.models.precision import DenseGroup, PrecisionName, Weights, form_problems
from moe_jax.models.remat import KEPT_PARTS, layers_and_parts
from moe_jax.parallel.choices import MESH_AXES, Hops, MeshShape, OptimizerName
from moe_jax.parallel.expert.settings import ExpertParallel

DTYPES = ("bfloat16", "float32")

Tracker = Literal["tensorboard", "wandb", "trackio"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True)
class RunSettings:
    """The settings of any run. `WANTED` and `ONE_OF` name the values that are allowed, by field.

    Attributes:
      model: a checkpoint folder or hub id.
      output: the folder for metrics and checkpoints. A run that finds checkpoints there continues from the last one.
      eval_every: steps between two measurements of the held-out loss; the last step is always measured.
      eval_batches: batches in a measurement, each with a micro-batch's rows; the same each time.
      keep_best: keep the checkpoint with the smallest held-out loss in addition to the newest ones, and end with its weights.
        Each improvement writes a checkpoint. May be changed when a run continues, like `early_stop` and all settings of the
        log.
      early_stop: end the run after this number of measurements of the held-out loss without an improvement; 0: never.
      log_every: steps between two lines on the console. The first and the last step and each measurement always have one, and
        metrics.jsonl has every step. None: chosen from 1, 2, 5, 10, 20, ..., for 50 to 125 lines per run.
      log_to: additional destinations of the log, any of tensorboard (output/tensorboard), wandb and trackio. The latter two
        send scalars and settings to their servers; each is a package to install.
      tensorboard: write output/tensorboard too.
      tokenizer: a folder or hub id; None: the model's.
      add_tokens: texts that become tokens of their own. The tokenizer and the vocabulary's tables are extended; new rows start
        as the mean of the others. With lora these rows are trained next to the adapters (docs/adapters.md).
      lora: train adapters and freeze the model's weights (docs/adapters.md). The run's folder gets the adapter instead of a
        model. None: train all parameters.
      gradient_accumulation: micro-batches in an optimizer step.
      steps: total number of optimizer steps. Run the command again with a larger value to continue a run that has ended.
      epochs: passes through the data, instead of `steps`; all of it is tokenized once to count the steps.
      min_learning_rate_ratio: the learning rate at the end, as a part of the peak.
      warmup_steps: steps in which the learning rate rises to its peak; None: a tenth of `steps`, at most 100.
      optimizer: "adamw"; "muon" for the layers' matrices with adamw for the rest; or "adafactor", whose state is small
        (docs/finetuning.md). The same learning rates fit all three.
      weight_decay: the optimizer's weight decay; norms and biases do not decay.
      max_grad_norm: gradients with a larger norm are scaled down to it.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep_checkpoints: the number of newest checkpoints to keep.
      dtype: the dtype that the model computes in, "bfloat16" or "float32".
      param_dtype: the dtype of parameters, and of their gradients within a micro-batch, "float32" or "bfloat16". Masters are
        float32 in either case: a bfloat16 parameter is the upper half of its master, so passes need no cast. None: float32.
        With lora these are the frozen weights, without gradients and masters, and None is `dtype`.
      remat: recompute layers in the backward pass: less memory, about a third more time. A number of last layers keep their
        residuals and are not recomputed. Parts after the number, as in 12,router,attention,experts, are kept by the other
        layers (docs/scaling.md). "auto": what fits into the device's memory, or nothing if its size is unknown. A run that
        continues keeps the choice of its beginning.
      offload: keep the input of each layer, which remat needs, in the host's memory: for long sequences (docs/scaling.md).
      weights: the form of the frozen weights under adapters: "whole", "as stored" for a checkpoint in FP8, or experts in "nf4"
        or "fp8" (docs/adapters.md).
      precision: "fp8" multiplies the experts in 8 bits, forward and for the gradients of their inputs; "fp8_kept" also keeps
        their activations in 8 bits (docs/fp8.md). "bf16": in `dtype`. A pipe must have the schedule "uniform".
      fp8_dense: with precision "fp8", dense matrices that also multiply in 8 bits: attention (its projections), shared_experts,
        mlp (dense layers). See docs/fp8.md.
      moment_dtype: the dtype of the optimizer's moments between steps, "float32", or "bfloat16" for half the memory.
      mesh: the numbers of devices over which rows, parameters, experts and sequences are spread (docs/scaling.md). All devices
        are used.
      shard_optimizer: split the optimizer's moments and the masters over mesh.data too (ZeRO, stage 1); parameters stay whole
        there. Needs a mesh.data of 2 or more. May be changed when a run continues.
      capacity_factor: the room of one exchange between experts' devices, as a multiple of an even routing's tokens. If it
        equals the number of devices along mesh.expert, every routing fits, and no layer waits to learn whether its tokens fit
        (docs/parallel_experts.md).
      hops: how gathered matrices, the ring along mesh.context and pairwise exchanges with experts travel between devices.
        "copies" are peer-to-peer copies between the GPUs of one process; "nccl" are collectives. None: copies if possible.
      shadow_experts: maximum number of experts that a layer may copy to all devices along mesh.expert for a step. A layer does
        so if the busiest device saves more than the copies cost (docs/parallel_experts.md).
      tokens_in_fp8: send tokens to the experts of other devices in FP8, for half the bytes (docs/fp8.md). Needs a precision in
        FP8, and a mesh.expert of 2 or more. May be changed when a run continues.
    """

    model: str
    data: Any
    output: str
    eval_data: str | None = None
    eval_every: int = 100
    eval_batches: int = 8
    keep_best: bool = False
    early_stop: int = 0
    log_every: int | None = None
    log_to: tuple[Tracker, ...] = ()
    tensorboard: bool = False
    tokenizer: str | None = None
    add_tokens: tuple[str, ...] = ()
    seq_len: int = 4096
    batch_size: int = 8
    gradient_accumulation: int = 1
    steps: int = 1000
    epochs: float | None = None
    learning_rate: float | None = None
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int | None = None
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    dtype: str = "bfloat16"
    param_dtype: str | None = None
    moment_dtype: str = "float32"
    remat: int | bool | str = "auto"
    offload: bool = False
    lora: LoraSettings | None = None
    weights: Weights = "whole"
    precision: PrecisionName = "bf16"
    fp8_dense: tuple[DenseGroup, ...] = ()
    mesh: MeshShape = MeshShape()
    shard_optimizer: bool = False
    capacity_factor: float = ExpertParallel.capacity_factor
    hops: Hops | None = None
    shadow_experts: int = 0
    tokens_in_fp8: bool = False
    dry_run: bool = False

    PEAKS: ClassVar[tuple[float, float]] = (1e-5, 1e-4)
    """Default peak learning rates for all weights, and for adapters, which need about ten times as much (Schulman, 2025,
    https://thinkingmachines.ai/blog/lora)."""
    WANTED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("model", "output"), "a string that is not empty"),
        **dict.fromkeys(
            ("batch_size", "gradient_accumulation", "steps", "checkpoint_every", "keep_checkpoints", "eval_every",
             "eval_batches", "log_every"),
            "an integer of at least 1",
        ),
        "seq_len": "an integer of at least 2",
        **dict.fromkeys(("warmup_steps", "early_stop", "shadow_experts"), "an integer of at least 0"),
        "seed": "an integer from 0 to 2**32 - 1",
        **dict.fromkeys(("epochs", "learning_rate", "max_grad_norm", "capacity_factor"), "a number greater than 0"),
        "weight_decay": "a number of at least 0",
        "min_learning_rate_ratio": "a number from 0 to 1",
    }  # fmt: skip
    ONE_OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("dtype", "param_dtype", "moment_dtype"), DTYPES),
        "optimizer": get_args(OptimizerName),
    }
    MAY_BE_NONE: ClassVar[tuple[str, ...]] = ("epochs", "warmup_steps", "log_every")
    OF_EXPERT_DEVICES: ClassVar[tuple[str, ...]] = ("shadow_experts", "tokens_in_fp8")
    """The settings that need experts on several devices."""
    NOT_READ: ClassVar[Mapping[str, str]] = {}
    """{setting that this kind of run refuses: why}."""
    RESUME_MUST_MATCH: ClassVar[tuple[str, ...]] = (
        *("seq_len", "batch_size", "gradient_accumulation", "learning_rate", "min_learning_rate_ratio", "warmup_steps"),
        *("optimizer", "weight_decay", "max_grad_norm", "seed", "dtype", "param_dtype", "moment_dtype"),
    )
    """Settings that may not change between the start of a run and its resumption."""

    def __post_init__(self):
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", self.default_learning_rate)
        if self.param_dtype is None:
            # Frozen weights need no masters.
            object.__setattr__(self, "param_dtype", "float32" if self.lora is None else self.dtype)
        if problems := self.values_problems() or self.problems():
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    @property
    def default_learning_rate(self) -> float:
        """The default peak learning rate of the run."""
        return self.PEAKS[self.lora is not None]

    @property
    def rows(self) -> int:
        """The rows of a micro-batch."""
        return self.batch_size // self.gradient_accumulation

    @property
    def expert_parallel(self) -> ExpertParallel:
        """The settings of the exchange of tokens with experts on other devices."""
        return ExpertParallel(
            capacity_factor=self.capacity_factor, shadow_experts=self.shadow_experts, tokens_in_fp8=self.tokens_in_fp8
        )

    def lora_of(self, tokenizer: Any) -> LoraSettings | None:
        """Returns the adapters' settings with the rows of `add_tokens`, which the tokenizer has already."""
        if self.lora is None or not self.add_tokens:
            return self.lora
        new = (*self.lora.trainable_token_indices, *tokenizer.convert_tokens_to_ids(list(self.add_tokens)))
        return replace(self.lora, trainable_token_indices=new)

    def values_problems(self) -> list[str]:
        """Returns the values that are never valid, one clause each."""
        problems = [
            f"{name}={value!r} must be {want}"
            for name, want in self.WANTED.items()
            if not ((value := getattr(self, name)) is None and name in self.MAY_BE_NONE) and not fits(value, want)
        ]
        problems += [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}"
            for name, choices in self.ONE_OF.items()
            if getattr(self, name) not in choices
        ]
        problems += [
            f"{each.name}={value!r} must be True or False"
            for each in fields(self)
            if isinstance(each.default, bool) and not isinstance(value := getattr(self, each.name), bool)
        ]
        if not isinstance(self.remat, bool) and self.remat != "auto" and layers_and_parts(self.remat) is None:
            problems.append(
                f"remat={self.remat!r} must be True, False, 'auto' or an integer of at least 0, with any parts that recomputed "
                f"layers keep, as in 12,{','.join(KEPT_PARTS)}"
            )
        elif self.offload and self.remat is False:
            problems.append("offload=True needs remat: without remat a layer keeps far more than its input")
        elif self.offload and self.remat is not True and self.remat != "auto":
            problems.append(
                f"offload=True and remat={self.remat} exclude each other: all layers' inputs go to the host's memory"
            )
        if isinstance(self.add_tokens, str) or not all(isinstance(token, str) and token for token in self.add_tokens):
            problems.append(f"add_tokens={self.add_tokens!r} must be a tuple of texts that are not empty")
        elif len(set(self.add_tokens)) < len(self.add_tokens):
            problems.append(f"add_tokens={self.add_tokens!r} has a token twice")
        if self.hops not in (None, *get_args(Hops)):
            problems.append(f"hops={self.hops!r} must be one of {', '.join(get_args(Hops))}, or None")
        for axis in MESH_AXES:
            if not fits(getattr(self.mesh, axis), "an integer of at least 1"):
                problems.append(f"mesh.{axis}={getattr(self.mesh, axis)!r} must be an integer of at least 1")
        return problems

    def problems(self) -> list[str]:
        """Returns the settings that contradict each other, one clause each; every value alone is valid."""
        problems = [
            f"{name}={value!r} is not for this run: {why}"
            for name, why in self.NOT_READ.items()
            if (value := getattr(self, name)) != getattr(RunSettings, name)
        ]
        if self.batch_size % self.gradient_accumulation:
            problems.append(
                f"batch_size={self.batch_size} must be a multiple of gradient_accumulation={self.gradient_accumulation}"
            )
        default = next(each.default for each in fields(self) if each.name == "steps")
        if self.epochs is not None and self.steps != default:
            problems.append(f"epochs={self.epochs} and steps={self.steps} exclude each other: give one of them")
        if self.epochs is None and self.warmup_steps is not None and self.warmup_steps > self.steps:
            problems.append(f"warmup_steps={self.warmup_steps} must not exceed steps={self.steps}")
        if self.optimizer == "adafactor" and self.moment_dtype != "float32":
            problems.append(
                f"moment_dtype={self.moment_dtype!r} cannot be used with optimizer='adafactor', whose moments are small anyway"
            )
        watched = [name for name in ("keep_best", "early_stop") if getattr(self, name) and self.eval_data is None]
        problems += [f"{name}={getattr(self, name)!r} needs a held-out loss: give eval_data" for name in watched]
        problems += dense_problems(self.fp8_dense, self.precision)
        problems += log_problems(self.tensorboard, self.log_to)
        problems += self.pipe_problems(self.mesh.pipe)
        problems += lora_problems(self.lora, asdict(self.mesh), self.precision)
        if self.lora is not None:
            moving = [f"{name}={getattr(self, name)!r}" for name in self.OF_EXPERT_DEVICES if getattr(self, name)]
            problems += [f"{each} is for runs without lora: frozen experts stay as they are" for each in moving]
        problems += weights_problems(self.weights, self.lora)
        of_weights = self.order_of_passes.get("pipe_schedule", "uniform"), self.lora, self.weights
        problems += precision_problems(self.precision, self.dtype, *of_weights, tokens_in_fp8=self.tokens_in_fp8)
        ways = self.mesh.size // (self.mesh.context * self.mesh.pipe)
        if self.rows % ways:
            problems.append(f"a micro-batch of {self.rows} rows cannot be divided among data x fsdp x expert = {ways} devices")
        if self.mesh.context > 1 and self.seq_len % (2 * self.mesh.context):
            problems.append(f"seq_len={self.seq_len} must be a multiple of 2 * mesh.context = {2 * self.mesh.context}")
        output = Path(self.output).expanduser()
        if output.is_file():
            problems.append(f"output={self.output!r} is a file; it must be a folder")
        for name, path in (("model", self.model), ("tokenizer", self.tokenizer)):
            folder = None if path is None else Path(path).expanduser()
            if folder is not None and folder.is_dir() and _is_replaced(folder.resolve(), output):
                problems.append(
                    f"{name}={path!r} must be outside of output={self.output!r}, where the run writes its own files and "
                    "replaces model/: copy it elsewhere, or give another output"
                )
        return problems

    @property
    def order_of_passes(self) -> dict[str, Any]:
        """The options of a `Parallelism` for the order of micro-batches; empty: in turn."""
        return {}

    def pipe_problems(self, ranks: int) -> list[str]:
        """Returns the settings that contradict a pipe of `ranks` ranks, one clause each; none for one rank."""
        raise NotImplementedError


def file_problems(output: str, data: str, eval_data: str | None) -> list[str]:
    """Returns problems of a run's files: data that does not exist, or output in its place."""
    problems = []
    for name, path in (("data", data), ("eval_data", eval_data)):
        if path is not None and not Path(path).expanduser().exists():
            problems.append(f"{name}={path!r} does not exist")
    if Path(output).expanduser().resolve() == Path(data).expanduser().resolve():
        problems.append(f"output={output!r} must be another folder than data")
    return problems


def precision_problems(
    precision: str,
    dtype: str,
    pipe_schedule: str = "uniform",
    lora: LoraSettings | None = None,
    weights: str = "whole",
    *,
    tokens_in_fp8: bool = False,
) -> list[str]:
    """Returns the settings that contradict a precision, one clause each. "bf16" contradicts only `tokens_in_fp8`.

    Args:
      pipe_schedule: the schedule of a mesh with a pipe.
      weights: the form of the frozen weights under adapters.
      tokens_in_fp8: as in `parallel.ExpertParallel`.
    """
    if precision not in get_args(PrecisionName):
        return [f"precision={precision!r} must be one of {', '.join(map(repr, get_args(PrecisionName)))}"]
    if precision == "bf16":
        needs = "tokens_in_fp8=True needs experts that multiply in FP8: give precision='fp8' or 'fp8_kept'; got 'bf16'"
        return [needs] if tokens_in_fp8 else []
    problems = []
    if dtype != "bfloat16":
        problems.append(f"precision={precision!r} needs dtype='bfloat16', which everything else computes in; got {dtype!r}")
    if pipe_schedule != "uniform":
        problems.append(f"precision={precision!r} needs pipe_schedule='uniform': {pipe_schedule!r} holds operands in bf16")
    if lora is not None and weights not in ("fp8", "as stored"):
        problems.append(
            f"precision={precision!r} would round the frozen experts again in each pass: give weights='fp8', which keeps them "
            f"in FP8; got {weights!r}"
        )
    return problems


def log_problems(tensorboard: bool, names: Sequence[str]) -> list[str]:
    """Returns unknown trackers and missing packages, one clause each.

    Args:
      tensorboard: the setting of this name.
      names: the values of `log_to`.
    """
    problems = []
    if tensorboard and importlib.util.find_spec("tensorboardX") is None:
        problems.append("tensorboard=True needs the package tensorboardX: pip install tensorboardX")
    for name in names:
        if name not in get_args(Tracker):
            problems.append(f"log_to={name!r} must be one of {', '.join(get_args(Tracker))}")
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            problems.append(f"log_to={name!r} needs the package {PACKAGES[name]}: pip install {PACKAGES[name]}")
    return problems


def dense_problems(fp8_dense: tuple[str, ...], precision: str) -> list[str]:
    """Returns the dense groups that contradict a precision, one clause each."""
    if not isinstance(fp8_dense, tuple):
        return [f"fp8_dense={fp8_dense!r} must be a tuple of groups, as ('attention',)"]
    problems, groups = [], get_args(DenseGroup)
    for group in fp8_dense:
        if group not in groups:
            problems.append(f"fp8_dense={group!r} must be one of {', '.join(map(repr, groups))}")
    if fp8_dense and precision == "bf16":
        problems.append("fp8_dense needs experts in FP8: give precision='fp8'")
    return problems


def weights_problems(weights: str, lora: LoraSettings | None) -> list[str]:
    """Returns the reasons why a run cannot have weights in this form, one clause each."""
    problems = form_problems(weights)
    if weights in get_args(Weights) and weights != "whole" and lora is None:
        problems.insert(0, f"weights={weights!r} cannot be trained: train adapters instead (lora)")
    return problems


def fits(value, want: str) -> bool:
    """Returns True if a value satisfies a clause of `WANTED`."""
    if want.startswith("a string"):
        return value is not None and bool(str(value))
    if isinstance(value, bool) or not isinstance(value, int if want.startswith("an integer") else int | float):
        return False
    bounds = {
        "an integer from 0 to 2**32 - 1": lambda: 0 <= value < 2**32,
        "a number greater than 0": lambda: 0 < value < float("inf"),
        "a number from 0 to 1": lambda: 0 <= value <= 1,
    }
    if want in bounds:
        return bounds[want]()
    return int(want.rpartition(" at least ")[2]) <= value < float("inf")


def lora_problems(lora: LoraSettings | None, mesh: Mapping[str, int], precision: str) -> list[str]:
    """Returns the settings that contradict training adapters, one clause each; none without adapters.

    Args:
      mesh: the number of devices along each axis.
    """
    if lora is None:
        return []
    problems = []
    if (ranks := mesh.get("pipe", 1)) > 1 and lora.dropout:
        problems.append(
            f"lora.dropout={lora.dropout} needs a mesh without pipe, whose passes draw no masks; got mesh.pipe={ranks}"
        )
    if precision != "bf16" and (devices := math.prod(mesh.values())) > 1:
        problems.append(f"precision={precision!r} with lora needs one device: use 'bf16', which dequantises; got {devices}")
    return problems


def _is_replaced(folder: Path, output: Path) -> bool:
    """Returns True if `folder` is the output folder, or inside the trained model's folder, which the run replaces."""
    # Imported here: this module imports JAX, and settings are read without JAX.
    from moe_jax.checkpoint.folders import previous_of

    model = (output / "model").resolve()
    return folder == output.resolve() or any(
        folder.is_relative_to(place) for place in (model, model.with_name(f".{model.name}.incomplete"), previous_of(model))
    )
