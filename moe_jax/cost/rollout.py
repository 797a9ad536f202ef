"""Cost of a step of reinforcement learning: an engine on each device draws answers, then all devices take a training step.

The two never need memory at the same time: pages and gathered copies of the weights are freed during an update.
Qwen3-30B-A3B on an H200 decoded 1, 16, 64 and 256 sequences of 128 tokens in 3.1, 10.9, 16.5 and 18.9 ms. `decode_seconds`
returns 2.9, 11.0, 16.2 and 18.7 ms. Times of whole rollouts were not compared.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.cost.flops import forward_flops_per_token
from moe_jax.cost.machine import Machine, all_gather_seconds
from moe_jax.cost.parameters import ELEMENT, shapes
from moe_jax.cost.step import Prediction

PAGE_TOKENS = 64
STEP_LAYER = 30e-6
"""Seconds of a decoding step for each layer, in addition to the bytes that it reads: the intercept of the times above."""
WORKSPACE = 3 * 2**30
"""Bytes of an engine's logits and prompt chunks, an estimate."""


@dataclass(frozen=True)
class PlannedRollout:
    """The answers of a step.

    Attributes:
      answers: over all devices.
      samples: answers to a prompt, which share its pages.
      prompt_tokens, new_tokens: means of their lengths.
      sequences, pages: of each device's engine. None: room for its share of the answers, or the memory that is left.
      drawing: the number of devices that draw.
    """

    answers: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    drawing: int
    sequences: int | None = None
    pages: int | None = None

    @property
    def pages_of_answer(self) -> int:
        """The pages of an answer with its prompt."""
        return math.ceil((self.prompt_tokens + self.new_tokens) / PAGE_TOKENS)

    @property
    def num_pages(self) -> int:
        """The pages of a device's engine."""
        return 1 + self._share * self.pages_of_answer if self.pages is None else self.pages

    @property
    def at_once(self) -> int:
        """The answers that a device draws at once."""
        return max(1, min(self._share, (self.num_pages - 1) // self.pages_of_answer))

    @property
    def waves(self) -> float:
        """The number of times that a device draws `at_once` answers."""
        return math.ceil(self.answers / self.drawing) / self.at_once

    @property
    def _share(self) -> int:
        share = math.ceil(self.answers / self.drawing)
        return share if self.sequences is None else min(share, self.sequences)


class RolloutPrediction(NamedTuple):
    """The predicted seconds of a step's phases, and the bytes of a device at the peak of a rollout and of an update."""

    update: Prediction
    rollout: PlannedRollout
    seconds: dict[str, float]
    rollout_bytes: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of a step and device."""
        devices = max(self.rollout.drawing, self.update.step.mesh.size)
        return self.rollout.answers * self.rollout.new_tokens / sum(self.seconds.values()) / devices

    @property
    def fits(self) -> bool:
        """True if both peaks fit in the device's memory."""
        return self.update.fits and sum(self.rollout_bytes.values()) <= self.update.machine.memory


def predict_rollout(rollout: PlannedRollout, update: Prediction) -> RolloutPrediction:
    """Returns the cost of a step whose training step is `update`, on the devices of its mesh."""
    step, machine = update.step, update.machine
    config, whole = step.config, ELEMENT * sum(math.prod(shape) for _, shape in shapes(step.config))
    in_layers = sum(math.prod(shape) for path, shape in shapes(config) if path[0] == "stages" and "experts" not in path)
    held = {
        "trainer": update.bytes["parameters"] + update.bytes["moments"],
        "whole copy": whole if (is_split := step.mesh.fsdp > 1) else 0.0,
        "engine": ELEMENT * in_layers + WORKSPACE,
    }
    if rollout.pages is None:
        room = int((machine.memory - sum(held.values())) / (PAGE_TOKENS * kept_bytes(config)))
        rollout = replace(rollout, pages=min(rollout.num_pages, max(room, 1 + rollout.pages_of_answer)))
    context = rollout.at_once * (rollout.prompt_tokens + rollout.new_tokens / 2)
    prompts = rollout.answers / rollout.samples * rollout.prompt_tokens / rollout.drawing
    decoding = rollout.waves * rollout.new_tokens * decode_seconds(config, rollout.at_once, context, machine)
    seconds = {
        "rollout": decoding + prompts * forward_flops_per_token(config, rollout.prompt_tokens) / machine.dense_matmul,
        "gather": all_gather_seconds(machine, whole, ("fsdp",), step.mesh) if is_split else 0.0,
        "update": update.step_seconds,
    }
    return RolloutPrediction(update, rollout, seconds, held | {"pages": rollout.num_pages * PAGE_TOKENS * kept_bytes(config)})


def rows_of(rollout: PlannedRollout, sequence_length: int) -> int:
    """Returns the rows of an update that packs all answers with their prompts, a multiple of the devices that draw."""
    per_row = max(1, sequence_length // (rollout.prompt_tokens + rollout.new_tokens))
    return rollout.drawing * math.ceil(rollout.answers / per_row / rollout.drawing)


def decode_seconds(config: ModelConfig, sequences: int, context: float, machine: Machine) -> float:
    """Returns the seconds of a decoding step: the bytes that it reads, its matmuls, and small kernels.

    Args:
      context: tokens of all sequences, whose keys and values are read.
    """
    sizes = {path: math.prod(shape) for path, shape in shapes(config)}
    experts: float = sum(size for path, size in sizes.items() if "experts" in path)
    head = config.vocab_size * config.hidden_size
    others = sum(size for path, size in sizes.items() if path[0] == "stages") - experts + head
    if (spec := config.experts) is not None:
        experts *= 1 - (1 - spec.num_experts_per_tok / spec.num_experts) ** sequences
    read = ELEMENT * (others + experts) + context * kept_bytes(config)
    computing = sequences * forward_flops_per_token(config, 1) / machine.dense_matmul
    return read / machine.hbm + computing + config.num_hidden_layers * STEP_LAYER


def kept_bytes(config: ModelConfig) -> float:
    """Returns the bytes of keys and values of a token, in all layers."""
    return ELEMENT * sum(math.prod(shape) for mixer in config.layer_mixers for shape in mixer.of_token)
