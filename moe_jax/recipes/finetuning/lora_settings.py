"""Settings that depend on a run's adapters: a default, and settings that do not go with them. Needs no JAX."""

from collections.abc import Mapping
from typing import get_args

from moe_jax.adapters.settings import LoraSettings
from moe_jax.checkpoint.weights import Weights, form_problems

LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 1e-4
"""Peaks of the learning rate. Adapters want about ten times as much (Schulman, 2025, https://thinkingmachines.ai/blog/lora)."""


def default_learning_rate(lora: LoraSettings | None) -> float:
    """Returns the peak of a run that was given none."""
    return LEARNING_RATE if lora is None else LORA_LEARNING_RATE


def default_param_dtype(lora: LoraSettings | None, dtype: str) -> str:
    """Returns the parameters' dtype in a run that was given none: frozen weights need no masters, and are as `dtype`."""
    return "float32" if lora is None else dtype


def lora_problems(lora: LoraSettings | None, mesh: Mapping[str, int], shard_optimizer: bool) -> list[str]:
    """Returns the settings that do not fit a run of adapters, one clause each; none without adapters.

    Args:
      mesh: the number of devices along each axis.
    """
    if lora is None:
        return []
    problems = []
    if split := [f"mesh.{axis}={size}" for axis, size in mesh.items() if axis != "data" and size > 1]:
        problems.append(
            "lora trains on one device, or on several along mesh.data alone: frozen weights must be whole on each device; "
            f"got {', '.join(split)}"
        )
    if shard_optimizer:
        problems.append("shard_optimizer=True is for runs without lora: the optimizer's state of adapters is small")
    return problems


def weights_problems(weights: str, lora: LoraSettings | None, devices: int) -> list[str]:
    """Returns the reasons why a run cannot have weights in this form, one clause each."""
    problems = form_problems(weights)
    if not problems and weights != "whole" and devices > 1:
        problems.append(f"weights={weights!r} need one device in training; the mesh has {devices}")
    if weights in get_args(Weights) and weights != "whole" and lora is None:
        problems.insert(0, f"weights={weights!r} cannot be trained: train adapters beside them (lora)")
    return problems
