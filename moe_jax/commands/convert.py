"""`moe-jax convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
from moe_jax.commands.options import Dtype
from moe_jax.train import model_of_run
from moe_jax.train.settings_file import chosen_template


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint between Hugging Face's layout and Orbax, checking every tensor on the way.

    moe-jax convert Qwen/Qwen3-30B-A3B out/orbax --to orbax

    moe-jax convert out/orbax out/hf --to hf

    moe-jax convert runs/mine out/hf --to hf --tokenizer Qwen/Qwen3-30B-A3B

    Args:
      source: a Hugging Face folder or hub id, an Orbax folder that this command wrote, or the output folder of a training run
        that has checkpoints.
      target: the folder to write; it is complete or absent.
      to: the layout to write.
      dtype: what the weights are stored as.
      step: of a training run, which checkpoint; default: the newest.
      tokenizer: the folder or hub id whose tokenizer files are copied; default: the source's, if it has some.
    """

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[str]
    to: Literal["orbax", "hf"] = "orbax"
    dtype: Dtype = "bfloat16"
    step: int | None = None
    tokenizer: str | None = None

    def run(self) -> None:
        """Loads and writes."""
        is_run, is_orbax = ((Path(self.source).expanduser() / name).is_dir() for name in ("checkpoints", "params"))
        if self.step is not None and not is_run:
            raise ValueError(f"--step is for the output folder of a training run; {self.source} has no checkpoints")
        if is_run:
            model = model_of_run(self.source, step=self.step, dtype=self.dtype)
        else:
            model = (load_orbax if is_orbax else from_pretrained)(self.source, dtype=self.dtype)
        save = save_orbax if self.to == "orbax" else save_pretrained
        template = chosen_template(Path(self.source).expanduser()) if is_run else None
        save(model, self.target, tokenizer_from=self.tokenizer, chat_template=template)
        print(f"wrote {self.target}")
