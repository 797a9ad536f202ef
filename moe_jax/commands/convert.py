"""`moe-jax convert`: converts a checkpoint between Hugging Face's layout and Orbax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from moe_jax.commands.options import Dtype, with_adapter


@dataclass(frozen=True)
class ConvertCommand:
    """Convert a checkpoint between Hugging Face's layout and Orbax, checking every tensor on the way.

    moe-jax convert Qwen/Qwen3-30B-A3B out/orbax --to orbax

    moe-jax convert out/orbax out/hf --to hf

    moe-jax convert runs/mine out/hf --to hf --tokenizer Qwen/Qwen3-30B-A3B

    moe-jax convert Qwen/Qwen3-30B-A3B out/merged --to hf --adapter out/adapter

    Args:
      source: a Hugging Face folder or hub id, an Orbax folder that this command wrote, or the output folder of a training run
        that has checkpoints.
      target: the folder to write; it is complete or absent.
      to: the layout to write.
      dtype: the dtype of the weights in the target. Default: the source's. FP8 becomes bfloat16; a training run gives its
        float32 master weights.
      adapter: a folder or hub id of an adapter (LoRA) that is added to the weights, in float32, and rounded once.
      step: the step of a training run's checkpoint. Default: the newest.
      tokenizer: the folder or hub id whose tokenizer files are copied. Default: the source's files, if it has any; for a
        training run, the tokenizer that it was trained with.
    """

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[str]
    to: Literal["orbax", "hf"] = "orbax"
    dtype: Dtype | None = None
    adapter: str | None = None
    step: int | None = None
    tokenizer: str | None = None

    def run(self) -> None:
        """Loads the source and writes the target."""
        from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained
        from moe_jax.checkpoint.hf_save import save_pretrained
        from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
        from moe_jax.checkpoint.stored_dtype import StoredDtype, stored_dtype
        from moe_jax.recipes.finetuning.settings_file import chosen_template
        from moe_jax.train import model_of_run

        is_run, is_orbax = ((Path(self.source).expanduser() / name).is_dir() for name in ("checkpoints", "params"))
        if self.step is not None and not is_run:
            raise ValueError(f"--step is for the output folder of a training run; {self.source} has no checkpoints")
        source = self.source if is_run or is_orbax else find_checkpoint(self.source)
        stored = StoredDtype("float32") if is_run else stored_dtype(source)
        dtype = self.dtype or stored.name
        if self.dtype is None and stored.remark:
            print(stored.remark)
        if is_run:
            model = model_of_run(source, step=self.step, dtype=dtype)
        else:
            model = (load_orbax if is_orbax else from_pretrained)(source, dtype=dtype)
        model = with_adapter(model, self.adapter)
        replaces = (Path(self.target).expanduser() / "config.json").is_file()
        save = save_orbax if self.to == "orbax" else save_pretrained
        template = chosen_template(Path(self.source).expanduser()) if is_run else None
        tokenizer = self.tokenizer or (_tokenizer_of_run(Path(self.source).expanduser()) if is_run else None)
        save(model, self.target, tokenizer_from=tokenizer, chat_template=template)
        rounded = f", rounded from {stored.name}" if _loses_bits(stored.name, dtype) else ""
        replaced = "; the checkpoint that was there is replaced" if replaces else ""
        print(f"wrote {self.target} in {dtype}{rounded}{replaced}")


def _tokenizer_of_run(output: Path) -> str | None:
    """Returns the folder or hub id of the run's tokenizer; if its files are missing, prints a note and returns None."""
    from moe_jax.checkpoint.companions import tokenizer_files
    from moe_jax.recipes.finetuning.settings_file import noted_tokenizer

    named = noted_tokenizer(output)
    try:
        tokenizer_files(named, None)
    except FileNotFoundError as error:
        print(f"no tokenizer is written; name one with --tokenizer: {error}")
        return None
    return named


def _loses_bits(stored: str, written: str) -> bool:
    """Returns True if writing rounds numbers of the stored dtype."""
    return stored != written and written != "float32"
