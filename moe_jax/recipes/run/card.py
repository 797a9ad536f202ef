"""Writes the model card of a run: README.md in the hub's format, next to the exported model or adapter."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from moe_jax.adapters.source import ADAPTER_FOLDER, CONFIG_FILE
from moe_jax.checkpoint.companions import read_json
from moe_jax.recipes.run.folder import config_of_export, noted_settings
from moe_jax.recipes.run.report import summary
from moe_jax.runtime.files import write_text
from moe_jax.train.data.sources import HUB_ID, sources
from moe_jax.train.metrics import read_records

CARD = "README.md"
ANY_REPOSITORY = "user/name"
"""Replaces the repository's name in a card that was written without one."""

SHOWN = (
    *("steps", "seq_len", "batch_size", "gradient_accumulation", "learning_rate", "warmup_steps", "optimizer", "weight_decay"),
    *("dtype", "param_dtype", "weights", "precision", "seed", "lora", "preference", "grpo", "reward", "prompts", "samples"),
)
"""Settings in a card, as far as a run has them. Others, such as names of files, stay in the run's folder."""

IN_VLLM = "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"
"""Types of models whose checkpoints vLLM reads; it does not read adapters of DeepSeek's."""
ADAPTED_IN_VLLM = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Modules whose adapters vLLM reads. It reads neither parameters, nor modules that are trained whole, nor rows of tokens."""
RANKS_OF_VLLM = 8, 16, 32, 64, 128, 256
NOT_JOINED_BY_PEFT = "qwen2_moe", "hy_v3", "axk1"
"""Types of models for which PEFT does not read each expert's factors (docs/models.md)."""


def exported(run: str | Path) -> Path:
    """Returns the folder of a run's exported model or adapter.

    Raises:
      FileNotFoundError: the run has not exported one, or `run` is not the output folder of a run.
      ValueError: the run has more steps to do, so that its metrics are of other weights.
    """
    run = Path(run).expanduser()
    settings, records = noted_settings(run), read_records(run / "metrics.jsonl")
    if not settings or not records:
        raise FileNotFoundError(f"{run} has no settings.json or no step in metrics.jsonl: give the --output of a finished run")
    config = config_of_export(run, adapter=bool(settings.get("lora")))
    done, steps = records[-1]["step"], settings.get("steps", 0)
    if done < steps and not settings.get("early_stop"):
        raise ValueError(f"{run} is at step {done} of {steps}: run its command again to its end first")
    if not config.is_file():
        raise FileNotFoundError(f"{config.parent} has no {config.name}: the run exports it at its end; run its command again")
    return config.parent


def write_card(run: str | Path, *, repository: str | None = None, license: str | None = None, force: bool = False) -> Path:
    """Writes README.md into the folder of a run's exported model or adapter, complete or absent; returns its path.

    It has the base, the data, the settings, losses or rewards, and how to load the weights. Paths of this machine are left out.
    Relative paths in the run's settings belong to the folder in which it was started: call this there. Elsewhere a path like
    texts/train would be taken for a data set of the hub.

    Args:
      repository: its future name on the hub, such as user/name.
      license: the license's name on the hub. Default: the base's, if its card is in its folder or in the hub's cache.
      force: replace a card that exists.

    Raises:
      FileExistsError: there is a card, and `force` is False.
      FileNotFoundError, ValueError: as in `exported`.
    """
    folder = exported(run)
    if (folder / CARD).exists() and not force:
        raise FileExistsError(f"{folder / CARD} exists: give --force to replace it")
    run = Path(run).expanduser()
    settings, records = noted_settings(run), read_records(run / "metrics.jsonl")
    is_adapter = folder.name == ADAPTER_FOLDER
    base = (read_json(folder / CONFIG_FILE)["base_model_name_or_path"] if is_adapter else None) or settings["model"]
    base_card = _file_of_base(base, CARD)
    if license is None and base_card is not None:
        license = ModelCard.load(base_card, ignore_metadata_errors=True).data.license
    on_hub = bool(HUB_ID.fullmatch(base)) and not Path(base).expanduser().exists()
    given = settings["data"]
    data = sources(given if isinstance(given, str) else list(given))
    kind = _kind(settings)
    header = ModelCardData(
        base_model=base if on_hub else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if on_hub else None,
        datasets=[source.path for source in data if source.on_hub] or None,
        library_name="peft" if is_adapter else "transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=["moe_jax", kind.lower().replace(" ", "-"), *(["lora"] if is_adapter else [])],
    )
    named_base = f"[{base}](https://huggingface.co/{base})" if on_hub else "a model that is not on the hub"
    versions = ", ".join(f"{name} {version}" for name, version in settings.get("versions", {}).items())
    best = ["The weights are those of the step with the smallest held-out loss."] if settings.get("keep_best") else []
    results = {name: value for name, value in summary(records, None).items() if not name.startswith("tokens")}
    # Files of rewards without their folders.
    settings |= {"reward": [Path(each).name for each in settings.get("reward", ())]}
    text = [
        f"# {(repository or run.resolve().name).rpartition('/')[2]}",
        f"{'An adapter (LoRA)' if is_adapter else 'All weights'} of {named_base}, trained by {kind} with {versions}.",
        "## Data",
        "\n".join(f"- {_told(source)}" for source in data),
        "## Results",
        *best,
        _table(results),
        "## Settings",
        _table(_flat(settings, SHOWN)),
        "## How to load it",
        *(_of_adapter if is_adapter else _of_model)(folder, repository or ANY_REPOSITORY, base, settings),
    ]
    write_text(folder / CARD, str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n")))
    return folder / CARD


def _kind(settings: dict[str, Any]) -> str:
    for name in ("preference", "grpo"):
        if name in settings:
            return settings[name]["loss"].upper().replace("_", " ")
    return "fine-tuning"


def _told(source: Any) -> str:
    """Describes a source without the folders of this machine."""
    options = [f"{name} {value}" for name in ("config", "split", "take", "weight") if (value := getattr(source, name))]
    name = f"[{source.path}](https://huggingface.co/datasets/{source.path})" if source.on_hub else f"`{Path(source.path).name}`"
    return ", ".join([name, *options])


def _flat(settings: dict[str, Any], names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Returns the settings of these names that have a value. Settings of a group are named group.name."""
    found: dict[str, Any] = {}
    for name in names:
        value = settings.get(name)
        if isinstance(value, dict):
            found |= _flat(value, value, f"{prefix}{name}.")
        elif value is not None and value is not False and value != []:
            found[prefix + name] = value
    return found


def _table(values: dict[str, Any]) -> str:
    cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    rows = (f"| {name} | {text.replace('|', '&#124;')} |" for name, text in cells.items())
    return "\n".join(["| | |", "|---|---|", *rows])


def _of_model(folder: Path, repository: str, base: str, settings: dict[str, Any]) -> list[str]:
    kind = read_json(folder / "config.json").get("model_type")
    lines = _code("moe_jax", f'import moe_jax\n\nmodel = moe_jax.from_pretrained("{repository}")')
    if kind in CONFIG_MAPPING_NAMES:
        loads = f'model = AutoModelForCausalLM.from_pretrained("{repository}")'
        lines += _code("transformers", f"from transformers import AutoModelForCausalLM\n\n{loads}")
    return lines + (_code("vLLM", f"vllm serve {repository}", "bash") if kind in IN_VLLM else [])


def _of_adapter(folder: Path, repository: str, base: str, settings: dict[str, Any]) -> list[str]:
    config, config_of_base = read_json(folder / CONFIG_FILE), _file_of_base(base, "config.json")
    kind = None if config_of_base is None else read_json(config_of_base).get("model_type")
    named, modules = base if HUB_ID.fullmatch(base) else "path/to/the/base", set(config["target_modules"])
    lines = _code("moe_jax", f'import moe_jax\n\nmodel = moe_jax.from_pretrained("{named}", adapter="{repository}")')
    of_experts = "gate_proj" in modules and kind in NOT_JOINED_BY_PEFT
    if kind is None or (kind in CONFIG_MAPPING_NAMES and not of_experts):
        new = settings.get("add_tokens")
        tokens = f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\nmodel.resize_token_embeddings(len(tokenizer))\n'
        lines += _code(
            "transformers and PEFT",
            f"from peft import PeftModel\nfrom transformers import AutoModelForCausalLM{', AutoTokenizer' if new else ''}\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{named}")\n{tokens if new else ""}'
            f'model = PeftModel.from_pretrained(model, "{repository}")',
        )
    others = any(config.get(name) for name in ("target_parameters", "modules_to_save", "trainable_token_indices"))
    rank, is_read = max([config["r"], *config["rank_pattern"].values()]), kind in IN_VLLM and not kind.startswith("deepseek")
    if is_read and modules <= ADAPTED_IN_VLLM and not others and rank <= RANKS_OF_VLLM[-1]:
        room = next(each for each in RANKS_OF_VLLM if each >= rank)
        options = f"--enable-lora --max-lora-rank {room} --lora-modules tuned={repository}"
        lines += _code("vLLM", f"vllm serve {named} {options}", "bash")
    return lines


def _code(title: str, code: str, language: str = "python") -> list[str]:
    return [f"With {title}:", f"```{language}\n{code}\n```"]


def _file_of_base(base: str, name: str) -> Path | None:
    """Returns a file of the base's folder, or of a hub id in the hub's cache; None if it is not there."""
    file = Path(base).expanduser() / name
    if not file.parent.exists() and HUB_ID.fullmatch(base) and isinstance(found := try_to_load_from_cache(base, name), str):
        file = Path(found)
    return file if file.is_file() else None
