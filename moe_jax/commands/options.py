"""Options that several commands share."""

import gc
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moe_jax.adapters.settings import LoraSettings
from moe_jax.config import HUB_IDS, NAMED_CONFIGS, ModelConfig, load_config

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe_jax.serving.request import EngineLimits

_logger = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float16", "float32"]

InferencePrecision = Literal["bf16", "fp8"]
"""Precision of the experts' matmuls in commands that do not train; "bf16" is the model's dtype."""


@dataclass(frozen=True)
class LimitOptions:
    """Size limits of a serving engine, as command-line options.

    Args:
      max_sequences: number of texts that each device computes at once.
      max_length: largest number of tokens of a text with its prompt. Default: 8192, or fewer if the model has fewer.
      max_tokens_per_step: number of tokens that each device computes at once, prompts and new ones.
      num_pages: number of pages of 64 tokens on each device, which running texts and the cache of prompts share.
      replicas: number of copies of all weights, each on --devices GPUs. They share one queue of requests, and no work.
      kv_dtype: "fp8" holds keys and values in pages of half the bytes, with a small error (docs/serving.md).
    """

    max_sequences: int = 256
    max_length: int | None = None
    max_tokens_per_step: int = 8192
    num_pages: int = 4096
    replicas: int = 1
    kv_dtype: Literal["model", "fp8"] = "model"

    def engine_limits(self, config: ModelConfig, max_waiting: int) -> "EngineLimits":
        """Returns the limits of an engine for a model of this config.

        Raises:
          ValueError: a size is below 1, or sizes contradict each other (for example, `max_length` exceeds the pages).
        """
        from moe_jax.serving.request import EngineLimits

        limits = EngineLimits(
            max_sequences=self.max_sequences,
            max_tokens_per_step=self.max_tokens_per_step,
            max_length=length_for(config, self.max_length),
            num_pages=self.num_pages,
            max_waiting=max_waiting,
            replicas=self.replicas,
            kv_dtype=self.kv_dtype,
        )
        if self.max_length is not None and self.max_length > limits.longest_in_pages:
            raise ValueError(
                f"--max-length {self.max_length} is more than the {limits.longest_in_pages} tokens that --num-pages "
                f"{self.num_pages} holds"
            )
        return limits


def tell_programs() -> None:
    """Logs to standard error that the model is loaded, then each program that the engine compiles."""
    print("loading and compiling ...", file=sys.stderr)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_jax.serving.programs").setLevel(logging.INFO)


def search_rarely() -> None:
    """Excludes all current objects from garbage collection (gc.freeze), for commands that run an engine until exit.

    Traversing a model's modules and JAX's caches delays a step by 10 ms.
    """
    gc.collect()
    gc.freeze()


def length_for(config: ModelConfig, max_length: int | None) -> int:
    """Returns the requested length. Prints a warning if it exceeds the model's positions.

    Default: 8192, or fewer if the model has fewer.
    """
    if max_length is None:
        return min(8192, config.max_position_embeddings)
    if max_length > (known := config.known_positions):
        _logger.warning(
            "--max-length %d is more than the %d positions of the model (max_position_embeddings): text beyond them may make "
            "no sense",
            max_length, known,
        )  # fmt: skip
    return max_length


def config_of(name: str) -> ModelConfig:
    """Returns the config of a published shape, of a folder, or of a model on the hub, in this order.

    Only models that are not in `NAMED_CONFIGS` are looked up on the hub; weights are not downloaded.

    Raises:
      FileNotFoundError: as `find_config`.
      ValueError: `name` matches none, or the config is refused.
    """
    if name not in NAMED_CONFIGS and not Path(name).is_dir():
        if "/" not in name:
            names = ", ".join(NAMED_CONFIGS)
            raise ValueError(f"no config {name!r}; give a folder with a config.json, a hub id, or one of {names}")
        name = HUB_IDS.get(name, name)
    if name in NAMED_CONFIGS:
        return NAMED_CONFIGS[name]
    from moe_jax.checkpoint.hf_load import find_config

    return load_config(find_config(name))


def device_count(devices: int | None) -> int:
    """Returns the number of devices to use. Default: 1; in a job of several processes, all devices.

    Raises:
      ValueError: `devices` is below 1 or above the number of visible devices, or a job of several processes would not use all.
    """
    import jax

    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    visible = jax.device_count()
    count = devices if devices is not None else visible if jax.process_count() > 1 else 1
    if count > visible or (jax.process_count() > 1 and count != visible):
        some = "all" if jax.process_count() > 1 else "1 to"
        raise ValueError(f"--devices must be {some} {visible}, the visible devices; got {devices}")
    return count


def engine_mesh(devices: int, config: ModelConfig, replicas: int) -> "Mesh | None":
    """Returns the mesh of an engine's first replica, on the first `devices` devices; None for one.

    Raises:
      ValueError: as `device_count`; or there are too few devices for the replicas.
    """
    import jax

    from moe_jax.generation import generation_mesh

    count = device_count(devices)
    if replicas * count > (visible := jax.local_device_count()):
        each = "" if count == 1 else f", for {count} each"
        raise ValueError(f"--replicas must be at most {visible // count}, the visible devices{each}; got {replicas}")
    return None if count == 1 else generation_mesh(jax.devices()[:count], config)


def lora_of_options(
    rank: int | None = None,
    alpha: float | None = None,
    targets: tuple[str, ...] | None = None,
    ranks: dict[str, int] | None = None,
    shared_outer: bool = False,
    use_rslora: bool = False,
    dropout: float | None = None,
    modules_to_save: tuple[str, ...] | None = None,
    trainable_token_indices: tuple[int, ...] | None = None,
) -> LoraSettings | None:
    """Adapters to train on frozen weights (docs/adapters.md), if any of these options is given.

    Args:
      rank: for each expert divided by the number of a token's experts: 32 is rank 4 for experts if a token has 8. All other
        targets have this rank. `ranks` overrides it. Default, if another of these options is given: 32.
      alpha: the change is multiplied by alpha / rank. Default: 32.
      targets: any of attention, mlp, experts, router, embedding, head, or projections of attention such as q_proj. Default:
        attention, mlp and experts.
      ranks: ranks of single targets, as in `experts 16 q_proj 64`.
      shared_outer: experts of a layer share the factors on the side of the hidden states.
      use_rslora: multiply the change by alpha / sqrt(rank) instead.
      dropout: probability with which an element of an adapter's input is dropped in training; for the targets attention and
        mlp. Default: 0.
      modules_to_save: modules to train as a whole, by the ends of their names on the hub: any of lm_head, embed_tokens, gate
        (routers) and norm.
      trainable_token_indices: ids of tokens whose rows of the embedding and head are trained alone. --add-tokens adds the ids
        of its tokens.
    """
    given: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "targets": targets,
        "ranks": ranks,
        "dropout": dropout,
        "modules_to_save": modules_to_save,
        "trainable_token_indices": trainable_token_indices,
    }
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: True for name, value in (("shared_outer", shared_outer), ("use_rslora", use_rslora)) if value}
    return LoraSettings(**given) if given else None


def options_of_lora(settings: LoraSettings) -> str:
    """Returns the command-line options for these LoRA settings; inverse of `lora_of_options`."""
    options = [f"--lora.rank {settings.rank}"]
    if settings.alpha != LoraSettings.alpha:
        options.append(f"--lora.alpha {settings.alpha:g}")
    if settings.targets is not None:
        options.append(f"--lora.targets {' '.join(settings.targets)}")
    if settings.ranks:
        options.append("--lora.ranks " + " ".join(f"{name} {rank}" for name, rank in settings.ranks.items()))
    if settings.dropout:
        options.append(f"--lora.dropout {settings.dropout:g}")
    if settings.modules_to_save:
        options.append(f"--lora.modules-to-save {' '.join(settings.modules_to_save)}")
    if settings.trainable_token_indices:
        options.append(f"--lora.trainable-token-indices {' '.join(map(str, settings.trainable_token_indices))}")
    flags = {"--lora.shared-outer": settings.shared_outer, "--lora.use-rslora": settings.use_rslora}
    return " ".join([*options, *(name for name, is_set in flags.items() if is_set)])


LoraOption = Annotated[LoraSettings | None, tyro.conf.arg(constructor=lora_of_options)]
"""Type of a command's field `lora`."""
