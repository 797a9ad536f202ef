"""Training on a mesh where experts change places gives the losses of one device, compiles once, resumes bit for bit, and
continues on one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import cpu_flags

ROOT = Path(__file__).parents[3]

SCRIPT = """
import logging, shutil, sys
from functools import partial
import jax, numpy as np
import moe_jax
from tests.helpers import shared_steps, tiny
from flax import nnx
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.train import model_of_run
from moe_jax.train.metrics import read_records
from moe_jax.train.rebalance import Places

folder = sys.argv[1]
tiny.write_texts(tiny.Path(folder) / "texts")

compilations = []
class Count(logging.Handler):
    def emit(self, record):
        if "Compiling jit(train_step)" in record.getMessage():
            compilations.append(1)
logging.getLogger("jax._src.interpreters.pxla").addHandler(Count())
jax.config.update("jax_log_compiles", True)

# Runs that compute the same share a step.
loop = sys.modules["moe_jax.recipes.run.model"]
loop.make_train_step = shared_steps.shared(loop.make_train_step)
# Balanced places of so few experts would often be the places that they have.
sys.modules["moe_jax.train.rebalance"].balanced_order = lambda load, *_: np.argsort(-load, kind="stable")

tiny.tokenizer().save_pretrained(folder + "/tokenizer")
moe_jax.save_pretrained(tiny.model(), folder + "/model", tokenizer_from=folder + "/tokenizer")
models = {}

def run(name, mesh, seq_len=32, stop_after=None, **options):
    model = moe_jax.from_pretrained(folder + "/model", dtype=np.float32, mesh=mesh, progress=False)
    settings = FinetuneSettings(
        model="none", data=folder + "/texts", output=folder + "/" + name, seq_len=seq_len, batch_size=4, steps=6,
        learning_rate=1e-2, warmup_steps=1, dtype="float32", checkpoint_every=3, **options,
    )
    result = finetune(settings, model=model, tokenizer=tiny.tokenizer(), stop_after=stop_after)
    models[name] = result.model
    return [r["loss"] for r in result.metrics]

def assert_same_experts(model, other, tolerance):
    for a, b in zip(*(jax.tree.leaves(nnx.state(m.stages)) for m in (model, other)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)

def loads(name):
    return [r["expert_load"] for r in read_records(tiny.Path(folder) / name / "expert_load.jsonl")]

one = run("one", None)
compilations.clear()
mesh = moe_jax.parallel.make_mesh(fsdp=2, expert=2)
many = run("many", mesh, rebalance_every=2)
print("compilations", len(compilations))
np.testing.assert_allclose(many[:2], one[:2], rtol=1e-4)
# The load-balancing loss of several layers alone looks at numbers.
np.testing.assert_allclose(many, one, rtol=1e-3)
assert_same_experts(models["many"], models["one"], 3e-2)

# Without moves the losses are equal in more digits.
run("plain", mesh, stop_after=3)
shutil.copytree(folder + "/plain", folder + "/plain moved")
for place in (("plain", mesh), ("plain moved", None)):
    np.testing.assert_allclose(run(*place), one, rtol=1e-4)

# Stopped between two moves; the loads that decide about the second began before.
run("parts", mesh, rebalance_every=2, stop_after=3)
shutil.copytree(folder + "/parts", folder + "/moved")
checkpoints = TrainingCheckpoints(folder + "/parts/checkpoints")
halfway = Places.from_json(checkpoints.position(checkpoints.latest_step())["places"])
assert (halfway.numbers != np.arange(4)).any() and halfway.load.sum() == np.sum(loads("parts")[-1])
assert_same_experts(model_of_run(folder + "/parts", dtype=np.float32), models["parts"], 0)
assert run("parts", mesh, rebalance_every=2) == many
assert_same_experts(models["parts"], models["many"], 0)
np.testing.assert_array_equal(loads("parts"), loads("many"))

over_context = moe_jax.parallel.make_mesh(expert=2, context=2)
for refused in (partial(run, "moved", over_context, shadow_experts=5), partial(run, "refused", over_context, seq_len=30)):
    try:
        refused()
    except ValueError as error:
        print(error)
np.testing.assert_allclose(run("moved", None), one, rtol=1e-3)
"""


@pytest.mark.long
def test_a_mesh_changes_nothing_but_the_place(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": cpu_flags.of_devices(4)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout
    assert "compilations 1" in printed
    assert "shadow_experts=5 must be at most the 4 experts of a layer" in printed
    assert "seq_len=30 must be a multiple of 2 * mesh.context = 4" in printed
    assert not (tmp_path / "refused").exists()
