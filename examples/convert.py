"""Read a Hugging Face checkpoint, look at it, and write it back: as another dtype here, but anything may happen in between.

python examples/convert.py Qwen/Qwen3-30B-A3B out/ --dtype bfloat16
"""

from dataclasses import dataclass

import jax
import tyro
from flax import nnx

import moe_jax
from moe_jax import checkpoint


@dataclass
class Settings:
    """Command-line options."""

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[str]
    dtype: str | None = None  # the source's


def main(settings: Settings) -> None:
    """Loads, prints every parameter's place and shape, saves."""
    folder = checkpoint.find_checkpoint(settings.source)
    model = moe_jax.from_pretrained(folder, dtype=settings.dtype or checkpoint.stored_dtype(folder).name)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        print(".".join(map(str, path)), parameter.shape, parameter.dtype)
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    moe_jax.save_pretrained(model, settings.target)
    print(f"wrote {total / 1e6:.2f} M parameters to {settings.target}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
