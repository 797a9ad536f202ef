"""`moe-jax tune`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Tune:
    """Time the Hopper kernels' tiles for a layer's experts on this GPU and write the fastest into a table.

    moe-jax tune --hidden 2048 --inter 1408 --experts 64 --top-k 6 --tokens 1 64 8192

    moe-jax tune --preset qwen3-30b-a3b deepseek-v3 --output tiles.json

    The kernels take the table that the environment variable MOE_JAX_TILES names. It changes their speed, not their results.

    Args:
      preset: instead of the four sizes, those of published models, one after the other.
      hidden: size of a token.
      inter: size of an expert's activation.
      experts: number of experts.
      top_k: experts that a token chooses.
      tokens: numbers of tokens to measure; those between take the tiles of the nearest.
      dtype: what the kernels compute in.
      output: the table; what it has for other sizes is kept. Default: the file that MOE_JAX_TILES names, else tiles.json.
    """

    preset: tuple[Literal["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b"], ...] = ()
    hidden: int | None = None
    inter: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096, 16384)
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    output: str | None = None

    def run(self) -> None:
        """Prints every time, and writes the table after each layer."""
        from moe_jax.kernels.experts.mosaic import tiles, tune

        sizes = [size for size in (self.hidden, self.inter, self.experts, self.top_k) if size is not None]
        if len(sizes) != (0 if self.preset else 4):
            raise ValueError("give either --preset NAME or all four of --hidden, --inter, --experts and --top-k")
        layers = [tune.PRESETS[name] for name in self.preset] or [tune.Layer(*sizes)]
        tokens = tuple(dict.fromkeys(self.tokens))
        for layer in layers:
            tune.check(layer, tokens, self.dtype)
        output = Path(self.output or os.environ.get(tiles.ENVIRONMENT_VARIABLE) or "tiles.json")
        # Whatever is wrong with the file is said before minutes of measuring.
        if output.exists():
            tiles.read_table(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        for layer in layers:
            print(f"{layer}, {self.dtype}\n{tune.HEADER}", flush=True)
            winners = []
            for timing in tune.tune(layer, tokens, self.dtype):
                print("\n".join(tune.rows(timing)), flush=True)
                winners.append(tune.entry(timing))
            tiles.merge_into_table(output, winners)
        print(f"wrote {output}; the kernels take it with {tiles.ENVIRONMENT_VARIABLE}={output.resolve()}")
