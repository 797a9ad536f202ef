"""The settings of a run of reinforcement learning, checked as a whole before anything happens."""

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, get_args

from moe_jax.recipes.run.settings import RunSettings, file_problems, fits
from moe_jax.reinforcement.settings import LossSettings, PolicySettings, mesh_problems

OnMismatch = Literal["stop", "warn"]

SHARED = "reward_weights", "exact", "samples", "max_new_tokens"
"""The fields that `PolicySettings` adds to `LossSettings`."""


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of the engine that draws the answers, on each device.

    Attributes:
      max_sequences: number of answers that are drawn at once. None: an equal share of a step's answers, at most 256.
      max_length: maximum number of tokens of a prompt and its answer. None: seq_len.
      num_pages: number of pages of 64 tokens, which running answers share. None: room for `max_sequences` of `max_length`
        tokens, at most 4096 pages.
      replicas: number of devices that draw, each with all weights. None: all devices of the mesh. Without a mesh the first one
        also learns.
    """

    max_sequences: int | None = None
    max_length: int | None = None
    num_pages: int | None = None
    replicas: int | None = None


@dataclass(frozen=True)
class GrpoSettings(RunSettings):
    """Train a model by rewards of its own answers (GRPO and others). The same command continues an interrupted run.

    moe-jax grpo --model Qwen/Qwen3-0.6B --data problems.jsonl --reward rewards.py:correct --output runs/rewarded --lora.rank 32

    The settings of `recipes.grpo`; wrong values raise a ValueError that lists them.

    Attributes:
      data: a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a folder of some. A row has a `prompt`, and columns that
        rewards read (docs/reinforcement.md).
      reward: the functions that score answers, each a file.py:function, a module:function, or the name of a ready one.
      reward_weights: the weight of each function in the reward; None: all 1.
      reward_timeout: seconds after which a call of a function in its own process is ended, and the run stops.
      on_reward_error: "stop" ends the run if a function raises or hangs; "none" leaves its reward out.
      environment: file.py:Class or module:Class of an environment, whose public methods are tools. None: answers have one turn.
      max_turns: maximum number of answers in a dialogue with an environment.
      eval_data: held-out prompts, whose mean reward is measured; None: no measurement.
      eval_batches: the number of held-out prompts of a measurement, as a multiple of `prompts`.
      prompts: prompts of a step.
      samples: answers that are drawn for each prompt.
      max_new_tokens: maximum number of tokens of an answer. Prompts that leave no room for it are left out and counted.
      exact: sampler and trainer compute the same log-probabilities, bit for bit, and an audit proves it. Not all models can.
      on_mismatch: "stop" ends the run if the audit finds a token whose log-probabilities differ; "warn" logs it.
      grpo: the loss and its numbers, and the temperature.
      engine: sizes of the engine that draws the answers.
      seq_len: tokens of a packed row of an update. A row has room for a prompt with its answer.
      batch_size: packed rows that each device computes at once in an update. It does not change what is learned.
      learning_rate: the peak, reached after `warmup_steps`, then constant. None: 1e-6, and 1e-5 with lora.
      min_learning_rate_ratio: 1 keeps the rate constant; with less it falls along a cosine.
      seed: decides the order of prompts, all answers, and the initial adapters.
      dry_run: check everything, print two prompts, and call each reward with a made-up answer. Draw and write nothing.
    """

    data: str
    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float = 300.0
    on_reward_error: Literal["stop", "none"] = "stop"
    environment: str | None = None
    max_turns: int = 8
    eval_every: int = 20
    eval_batches: int = 1
    prompts: int = 32
    samples: int = 8
    max_new_tokens: int = 1024
    exact: bool = False
    on_mismatch: OnMismatch = "stop"
    grpo: LossSettings = LossSettings()
    engine: EngineSizes = EngineSizes()
    batch_size: int = 1
    steps: int = 200
    min_learning_rate_ratio: float = 1.0
    weight_decay: float = 0.0
    checkpoint_every: int = 10

    PEAKS: ClassVar[tuple[float, float]] = (1e-6, 1e-5)
    """Rewards need less than fine-tuning."""
    RESUME_MUST_MATCH = ("prompts", "max_turns", *SHARED, *RunSettings.RESUME_MUST_MATCH)
    WANTED = {
        **RunSettings.WANTED,
        "data": "a string that is not empty",
        **dict.fromkeys(("prompts", "max_turns"), "an integer of at least 1"),
        "reward_timeout": "a number greater than 0",
    }
    NOT_READ = {
        "gradient_accumulation": "an update has as many micro-batches of batch_size rows as its samples fill",
        "keep_best": "a run keeps its newest checkpoints; eval_reward in metrics.jsonl shows the best step",
        "early_stop": "a run ends after its steps",
        **dict.fromkeys(("remat", "offload"), "updates recompute each layer, and keep its input on the device"),
        **dict.fromkeys(("precision", "fp8_dense"), "experts are drawn from and learned in dtype"),
        **dict.fromkeys(
            ("shard_optimizer", "capacity_factor", "hops", *RunSettings.OF_EXPERT_DEVICES),
            "it learns over mesh.data and mesh.fsdp alone, with the default transfers",
        ),
    }
    ONE_OF = {**RunSettings.ONE_OF, "on_mismatch": get_args(OnMismatch), "on_reward_error": ("stop", "none")}

    def __post_init__(self):
        super().__post_init__()
        # Its own checks cover the settings that are shared with it.
        self.policy  # noqa: B018

    @property
    def rows(self) -> int:
        """The rows of a micro-batch, on all devices."""
        return self.batch_size * self.mesh.size

    @property
    def policy(self) -> PolicySettings:
        """The algorithm with the answers of a step."""
        return PolicySettings(**asdict(self.grpo), **{name: getattr(self, name) for name in SHARED})

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer."""
        return self.seq_len if self.engine.max_length is None else self.engine.max_length

    @property
    def max_prompt(self) -> int:
        """The maximum number of tokens of a prompt."""
        return self.max_length - self.max_new_tokens

    def problems(self) -> list[str]:
        """Adds to the problems of `RunSettings`: files that do not exist, and sizes without room for an answer."""
        problems = super().problems() + file_problems(self.output, self.data, self.eval_data)
        problems += mesh_problems(asdict(self.mesh), self.engine.replicas, self.exact, self.lora is not None)
        if type(self.grpo) is not LossSettings:
            problems.append(f"grpo={self.grpo!r} must be a LossSettings; {', '.join(SHARED)} are settings of the run")
        elif self.grpo.beta and self.lora is None:
            problems.append(
                f"grpo.beta={self.grpo.beta!r} needs a reference, the model without adapters: set lora, or leave it at 0"
            )
        if self.exact and self.weights != "whole":
            problems.append(f"weights={self.weights!r} has no exact log-probabilities: leave it whole, or set exact=False")
        wrong = [
            f"engine.{name}={value!r} must be an integer of at least 1"
            for name, value in asdict(self.engine).items()
            if value is not None and not fits(value, "an integer of at least 1")
        ]
        if wrong or not fits(self.max_new_tokens, "an integer of at least 1"):
            return problems + wrong
        if self.max_length > self.seq_len:
            problems.append(f"engine.max_length={self.max_length} must not exceed seq_len={self.seq_len}: a row holds a sample")
        if self.max_prompt < 1:
            problems.append(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in {self.max_length} tokens: give a larger "
                "seq_len, or fewer new tokens"
            )
        return problems

    def pipe_problems(self, ranks: int) -> list[str]:
        """Returns none: `mesh_problems` refuses a pipe."""
        return []
