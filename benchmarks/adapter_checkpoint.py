"""Times the checkpoint of a run that trains adapters beside Qwen3-30B-A3B: its size, saving, and reading it back.

    python benchmarks/adapter_checkpoint.py
    python benchmarks/adapter_checkpoint.py --expert-rank 16 --folder /a/disk
    python benchmarks/adapter_checkpoint.py --config small                       # a smoke test

The checkpoint has the adapters and the optimizer's moments, in f32. The frozen weights are no part of it, so that they are not
made here. "returns" is the time that the training loop waits; the rest of the save goes on beside the next steps.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax import from_config
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.config import NAMED_CONFIGS
from moe_jax.train import make_optimizer
from moe_jax.train.state import TrainState

SMALL = dict(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4,
)  # fmt: skip


def main() -> None:
    """Prints the size and three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=(*NAMED_CONFIGS, "small"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--expert-rank", type=int, help="the rank of each expert; default: that of LoraSettings")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: that of temporary files")
    args = parser.parse_args()
    is_small = args.config == "small"
    config = replace(NAMED_CONFIGS["qwen3-30b-a3b"], **SMALL) if is_small else NAMED_CONFIGS[args.config]
    ranks = {} if args.expert_rank is None else {"experts": args.expert_rank}
    state = adapters_state(config.without_mtp(), LoraSettings(rank=args.rank, ranks=ranks))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoints = TrainingCheckpoints(folder)
        began = time.perf_counter()
        checkpoints.save(1, state, {"step": 1})
        returned = time.perf_counter()
        checkpoints.close()
        saved = time.perf_counter()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        checkpoints = TrainingCheckpoints(folder)
        restored = jax.block_until_ready(checkpoints.restore(1, state))
        read = time.perf_counter()
        checkpoints.close()
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert np.array_equal(ours, theirs), "the checkpoint holds other bits"
    trained = sum(array.size for array in jax.tree.leaves(state.params))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.config}: {trained / 1e6:.0f} M trained parameters")
    print(
        f"{size / 1e9:.2f} GB; save returns after {returned - began:.2f} s, is complete after {saved - began:.2f} s; "
        f"read in {read - saved:.2f} s, equal bit for bit"
    )


def adapters_state(config, settings: LoraSettings) -> TrainState:
    """Returns the state of a run's adapters, as after some steps: no array is zeros, which would shrink on disk."""

    def make() -> nnx.Module:
        model = from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        add_lora(model, settings, rngs=nnx.Rngs(0))
        return model

    params = nnx.state(nnx.eval_shape(make), nnx.Param)
    optimizer = make_optimizer(1e-5)
    abstract = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(abstract))))

    def value(like: jax.ShapeDtypeStruct) -> jax.Array:
        is_float = jnp.issubdtype(like.dtype, jnp.floating)
        return jax.random.normal(next(keys), like.shape, like.dtype) if is_float else jnp.ones(like.shape, like.dtype)

    return jax.tree.map(value, abstract)


if __name__ == "__main__":
    main()
