"""`moe-jax tune`: times the tiles of the Hopper kernels and writes the fastest into a table."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_jax.config import EXPERT_LAYERS

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(EXPERT_LAYERS)]


@dataclass(frozen=True)
class TuneCommand:
    """Time the Hopper kernels' tiles for a layer's experts on this GPU and write the fastest into a table.

    moe-jax tune --hidden 2048 --inter 1408 --experts 64 --top-k 6 --tokens 1 64 8192

    moe-jax tune --preset qwen3-30b-a3b deepseek-v3 --output tiles.json

    The environment variable MOE_JAX_TILES names the table that the kernels use. It changes their speed, not their results.

    Args:
      preset: published models to tune for, one after another, instead of the four sizes.
      hidden: width of a token.
      inter: width of an expert's activation.
      experts: number of experts.
      top_k: number of experts for each token.
      tokens: numbers of tokens to measure; other numbers use the tiles of the nearest.
      dtype: the dtype that the kernels compute in.
      output: the table; its entries for other sizes are kept. Default: the file that MOE_JAX_TILES names, else tiles.json.
    """

    preset: tuple[PresetName, ...] = ()
    hidden: int | None = None
    inter: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096, 16384)
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    output: str | None = None

    def run(self) -> None:
        """Prints every measured time, and writes the table after each layer."""
        from moe_jax.kernels.experts.mosaic import tiles, tune

        sizes = [size for size in (self.hidden, self.inter, self.experts, self.top_k) if size is not None]
        if len(sizes) != (0 if self.preset else 4):
            raise ValueError("give either --preset NAME or all four of --hidden, --inter, --experts and --top-k")
        layers = [tune.Layer(**EXPERT_LAYERS[name]._asdict()) for name in self.preset] or [tune.Layer(*sizes)]
        tokens = tuple(dict.fromkeys(self.tokens))
        for layer in layers:
            tune.check(layer, tokens, self.dtype)
        output = Path(self.output or os.environ.get(tiles.ENVIRONMENT_VARIABLE) or "tiles.json")
        # Reading the table first reports a broken file before minutes of measuring.
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
