"""Training on a mesh gives the single device's losses, compiles once, resumes bit for bit, and continues on another mesh or
on one device, with shadow experts too, and where experts change places."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import cpu_flags

ROOT = Path(__file__).parents[3]

COMMON = """
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
tiny.tokenizer().save_pretrained(folder + "/tokenizer")
moe_jax.save_pretrained(tiny.model(), folder + "/model", tokenizer_from=folder + "/tokenizer")
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
# Copies of so few weights never pay by themselves.
free = partial(moe_jax.parallel.ExpertParallel, flops_per_byte=0.0)
sys.modules["moe_jax.recipes.run.model"].ExpertParallel = free

def run(name, mesh, shadow_experts=0, seq_len=32, rebalance_every=0, shard_optimizer=False, **stop):
    model = moe_jax.from_pretrained(folder + "/model", dtype=np.float32, mesh=mesh, progress=False)
    settings = FinetuneSettings(
        model="none", data=folder + "/texts", output=folder + "/" + name, seq_len=seq_len, batch_size=4, steps=6,
        learning_rate=1e-2, warmup_steps=1, dtype="float32", checkpoint_every=3, shadow_experts=shadow_experts,
        rebalance_every=rebalance_every, shard_optimizer=shard_optimizer,
    )
    result = finetune(settings, model=model, tokenizer=tiny.tokenizer(), **stop)
    models[name], metrics = result.model, result.metrics
    assert any(r["num_shadows"] for r in metrics[3:]) == bool(shadow_experts)
    return [r["loss"] for r in metrics]

models = {}

def assert_same_experts(model, other, tolerance):
    for a, b in zip(*(jax.tree.leaves(nnx.state(m.stages)) for m in (model, other)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)

def read_places(name):
    checkpoints = TrainingCheckpoints(folder + "/" + name + "/checkpoints")
    return Places.from_json(checkpoints.position(checkpoints.latest_step())["places"])

def loads(name):
    return [r["expert_load"] for r in read_records(tiny.Path(folder) / name / "expert_load.jsonl")]

one = run("one", None)
"""

SCRIPT = """
compilations.clear()
mesh = moe_jax.parallel.make_mesh(fsdp=2, expert=2)
many = run("many", mesh)
print("compilations", len(compilations))
np.testing.assert_allclose(many, one, rtol=1e-4)
run("resumed", mesh, stop_after=3)
shutil.copytree(folder + "/resumed", folder + "/moved")
assert run("resumed", mesh) == many
over_context = moe_jax.parallel.make_mesh(expert=2, context=2)
for refused in (partial(run, "moved", over_context, shadow_experts=5), partial(run, "refused", over_context, seq_len=30)):
    try:
        refused()
    except ValueError as error:
        print(error)
np.testing.assert_allclose(run("moved", None), one, rtol=1e-4)

# As even as so few experts are, they would often stay where they are.
sys.modules["moe_jax.train.rebalance"].balanced_order = lambda load, *_: np.argsort(-load, kind="stable")
# Stopped between two moves and resumed; the loads that decide about the second began before.
places = run("places", mesh, rebalance_every=2)
run("stopped", mesh, rebalance_every=2, stop_after=3)
halfway = read_places("stopped")
assert (halfway.numbers != np.arange(4)).any() and halfway.load.sum() == np.sum(loads("stopped")[-1])
assert_same_experts(model_of_run(folder + "/stopped", dtype=np.float32), models["stopped"], 0)
assert run("stopped", mesh, rebalance_every=2) == places
assert_same_experts(models["stopped"], models["places"], 0)
np.testing.assert_array_equal(loads("stopped"), loads("places"))
# The load-balancing loss of several layers alone looks at numbers.
np.testing.assert_allclose(places, one, rtol=1e-3)
assert_same_experts(models["places"], models["one"], 3e-2)
"""

PARTS = """
over_data, over_context = moe_jax.parallel.make_mesh(data=2, fsdp=2), moe_jax.parallel.make_mesh(expert=2, context=2)
run("parts", over_data, shard_optimizer=True, stop_after=3)
shutil.copytree(folder + "/parts", folder + "/parts moved")
np.testing.assert_allclose(run("parts", over_data, shard_optimizer=True), one, rtol=1e-4)
np.testing.assert_allclose(run("parts moved", over_context, shadow_experts=2), one, rtol=1e-4)
"""


@pytest.mark.long
def test_a_mesh_changes_nothing_but_the_place(tmp_path):
    printed = output_of(COMMON + SCRIPT, tmp_path)
    assert "compilations 1" in printed
    assert "shadow_experts=5 must be at most the 4 experts of a layer" in printed
    assert "seq_len=30 must be a multiple of 2 * mesh.context = 4" in printed
    assert not (tmp_path / "refused").exists()


@pytest.mark.thorough
def test_an_optimizer_in_parts(tmp_path):
    """The optimizer's state is split over data; a second half of the run is on a mesh without, with shadow experts."""
    output_of(COMMON + PARTS, tmp_path)


def output_of(script, folder) -> str:
    """Returns what a process of four devices prints that runs the script in the folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": cpu_flags.of_devices(4),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
