"""Checks the installed package without the repository; `make dist` runs it in a new environment, from an empty folder.

It is no test of pytest: the environment has no extras, so nothing here may need one.
"""

import contextlib
import io
import math
import re
import subprocess
import sys
from importlib.metadata import files, metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import moe_jax
from moe_jax.cli import COMMANDS, main

EXTRAS = {"cuda12", "cuda13", "triton", "serve", "data", "grammar", "all"}


def check_files() -> None:
    """Checks that the installed package is the one imported, with every needed file and extra, and no other files."""
    assert Path(moe_jax.__file__).is_relative_to(sys.prefix), f"imported {moe_jax.__file__}, not the installed package"
    names = [str(file) for file in files("moe_jax") or ()]
    pages = (f"moe_jax/pages/{name}" for name in ("shared.css", "shared.js", "run.html", "run.js", "chat.html", "chat.js"))
    needed = ("moe_jax/py.typed", "moe_jax/kernels/experts/mosaic/tiles.json", "licenses/LICENSE", *pages)
    missing = [each for each in needed if not any(name.endswith(each) for name in names)]
    assert not missing, f"the package lacks {missing}"
    others = {name.split("/")[0] for name in names} - {"moe_jax", f"moe_jax-{moe_jax.__version__}.dist-info", ".."}
    assert not others, f"the package holds {others}"
    assert not [name for name in names if re.match(r"(tests|benchmarks|examples)/", name)]
    missing_extras = EXTRAS - set(metadata("moe_jax").get_all("Provides-Extra") or ())
    assert not missing_extras, f"the package lacks the extras {missing_extras}"


def check_names() -> None:
    """Imports every public name."""
    for module in (moe_jax, *(getattr(moe_jax, name) for name in moe_jax.__all__)):
        for name in getattr(module, "__all__", ()):
            getattr(module, name)


def check_layer() -> None:
    """Computes a layer of experts, and the gradients of all its parameters."""
    layer = moe_jax.MoE(32, 64, num_experts=8, num_experts_per_tok=2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, 32))
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda layer: jnp.square(layer(x)[0]).sum()))(layer)
    assert math.isfinite(loss) and all(bool(jnp.isfinite(a).all() & (a != 0).any()) for a in jax.tree.leaves(gradients))


def check_generation() -> None:
    """Generates tokens with a small model."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = moe_jax.Qwen3MoeConfig(
        **sizes, vocab_size=64, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    model = moe_jax.from_config(config, rngs=nnx.Rngs(0))
    (tokens,) = moe_jax.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(tokens) == 4, tokens


def check_commands() -> None:
    """Prints the help of every command, and the version by the installed program."""
    program = Path(sys.executable).with_name("moe-jax")
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    assert moe_jax.__version__ in version, version
    for name in (name for commands in COMMANDS.values() for name in commands):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            try:
                status = main([name, "--help"])
            except SystemExit as ended:
                status = ended.code
        assert not status and f"moe-jax {name}" in text.getvalue(), f"moe-jax {name} --help: status {status}"


if __name__ == "__main__":
    for check in (check_files, check_names, check_layer, check_generation, check_commands):
        check()
    print(f"moe_jax {moe_jax.__version__} works with Python {sys.version.split()[0]} and jax {jax.__version__}")
