"""`moe-jax check`: runs one forward and one backward pass of a model."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from moe_jax.commands.options import Dtype, device_count
from moe_jax.config import NAMED_CONFIGS
from moe_jax.runtime.files import write_text


@dataclass(frozen=True)
class CheckCommand:
    """Run one forward and one backward pass: next token, loss, gradient norm, seconds, peak memory.

    moe-jax check Qwen/Qwen3-30B-A3B --prompt "The capital of France is"

    moe-jax check Qwen/Qwen3-235B-A22B --devices 8

    moe-jax check --random-config qwen3-30b-a3b --tokens 100

    Args:
      path: a Hugging Face folder or hub id.
      prompt: the text to run on.
      random_config: a published shape to check with random weights, instead of a checkpoint.
      tokens: with --random-config, the number of random tokens. Default: 100.
      layers: with --random-config, the number of layers. Default: all of the published shape.
      devices: number of GPUs that share the parameters and the experts, for a model that is too large for one GPU. Default: 1;
        in a job of several processes, all GPUs.
      dtype: the dtype that the model computes in.
      repeats: number of timed calls of each pass; the median is reported.
      json: also write the report to this file.
    """

    path: Annotated[str | None, tyro.conf.Positional] = None
    prompt: str = "The capital of France is"
    random_config: str | None = None
    tokens: int | None = None
    layers: int | None = None
    devices: int | None = None
    dtype: Dtype = "bfloat16"
    repeats: int = 5
    json: str | None = None

    def run(self) -> None:
        """Runs the check and prints the report."""
        import jax

        from moe_jax.check import report as check
        from moe_jax.runtime.processes import is_first_process

        if (self.path is None) == (self.random_config is None):
            raise ValueError("give either a checkpoint's path or --random-config NAME")
        for name in ("tokens", "layers"):
            if self.path is not None and getattr(self, name) is not None:
                raise ValueError(f"--{name} goes with --random-config; a checkpoint is checked whole, on the prompt's tokens")
        if self.json is not None and not Path(self.json).parent.is_dir():
            raise ValueError(f"--json {self.json}: there is no folder {Path(self.json).parent}")
        if self.json is not None and Path(self.json).is_dir():
            raise ValueError(f"--json {self.json} is a folder; give a file")
        count = device_count(self.devices)
        devices = None if count == 1 else jax.devices()[:count]
        options: dict[str, Any] = dict(dtype=self.dtype, devices=devices, repeats=self.repeats)
        if self.path is not None:
            report = check.check_checkpoint(self.path, self.prompt, **options)
        elif self.random_config in NAMED_CONFIGS:
            config = NAMED_CONFIGS[self.random_config]
            config = config if self.layers is None else config.with_layers(self.layers)
            report = check.check_random(config, 100 if self.tokens is None else self.tokens, **options)
        else:
            raise ValueError(f"no config {self.random_config!r}; there are: {', '.join(NAMED_CONFIGS)}")
        if not is_first_process():
            return
        print(check.format_report(report))
        if self.json is not None:
            write_text(Path(self.json), json.dumps(asdict(report), indent=1) + "\n")
