"""Runs on preferences over a mesh: reference, losses and the best step are one device's, and a broken run resumes."""

import json

import numpy as np
import pytest

from moe_jax.adapters import LoraSettings
from moe_jax.checkpoint.training import finished_steps
from moe_jax.parallel.choices import MeshShape
from moe_jax.preferences import PreferenceSettings
from moe_jax.recipes import PreferSettings, prefer
from moe_jax.train.metrics import read_records
from tests.helpers import shared_steps, tiny
from tests.helpers.meshes import laid_out


def adapted():
    """A model whose runs train adapters, and which is its own reference without them."""
    return tiny.dense()


NOISE = {"reward_accuracy"}
"""Before the first step all rewards are 0 but for rounding."""


@pytest.fixture(scope="module", autouse=True)
def one_step_for_all():
    """Runs on equal meshes share a compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        shared_steps.share(patch)
        yield


@pytest.fixture
def run(tmp_path):
    """Returns a function that trains, in a folder of a name, a model that is on the devices of a mesh."""
    for name, number in (("pairs", 24), ("held_out", 5)):
        pairs = [dict(prompt=f"{name} {i}?", chosen=f"please, {i}" * (1 + i % 2), rejected=f"no, {i}!") for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def train(output, sizes, loss, make_model, on_step=None):
        settings = PreferSettings(
            model="none", data=str(tmp_path / "pairs.jsonl"), output=str(tmp_path / output), seq_len=128, batch_size=8,
            gradient_accumulation=2, steps=4, learning_rate=1e-4, warmup_steps=1, dtype="float32", checkpoint_every=2,
            eval_data=str(tmp_path / "held_out.jsonl"), eval_every=1, eval_batches=1, keep_best=True,
            preference=PreferenceSettings(loss, beta=0.3),
            lora=LoraSettings(rank=4) if make_model is adapted else None,
        )  # fmt: skip
        model = laid_out(make_model(), **sizes) if sizes else make_model()
        return prefer(settings, model=model, tokenizer=tiny.tokenizer(), on_step=on_step)

    return train


def untimed(records):
    return [
        {name: value for name, value in record.items() if name not in ("tokens_per_second", "model_tflops", "step_time")}
        for record in records
    ]


def die_at_step_three(record):
    if record["step"] == 3:
        raise InterruptedError


@pytest.mark.long
@pytest.mark.parametrize(
    "loss, sizes, make_model",
    [
        ("dpo", dict(fsdp=2), tiny.dense),
        pytest.param("orpo", dict(expert=2, context=2), tiny.model, marks=pytest.mark.thorough),
        pytest.param("dpo", dict(fsdp=2, data=2), adapted, marks=pytest.mark.thorough),
    ],
    ids=["dpo", "orpo", "adapters"],
)
def test_a_run_on_a_mesh_is_the_run_of_one_device(run, tmp_path, loss, sizes, make_model):
    """Records and reference equal one device's, although the run died and resumed; the repeated step has equal bits."""
    one = run("one", {}, loss, make_model)
    with pytest.raises(InterruptedError):
        run("many", sizes, loss, make_model, on_step=die_at_step_three)
    died = read_records(tmp_path / "many" / "metrics.jsonl")
    assert len(died) == 3 and finished_steps(tmp_path / "many" / "checkpoints")
    many = run("many", sizes, loss, make_model)
    assert untimed(many.metrics[:3]) == untimed(died)
    for ours, theirs in zip(untimed(many.metrics), untimed(one.metrics), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - (NOISE if ours["step"] == 1 else set()):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=1e-5, err_msg=name)
    has_reference = loss != "orpo" and make_model is not adapted
    assert (tmp_path / "many" / "reference_data.npy").exists() == has_reference
    if has_reference:
        tables = (np.load(tmp_path / name / "reference_data.npy") for name in ("many", "one"))
        np.testing.assert_allclose(*tables, rtol=1e-5)
    loads = ([each["expert_load"] for each in read_records(tmp_path / name / "expert_load.jsonl")] for name in ("many", "one"))
    np.testing.assert_allclose(*loads, atol=2)
    assert many.model_step == one.model_step and many.finished


def test_a_pipe_and_uneven_rows_are_refused(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    paths = dict(model="none", data=str(tmp_path / "pairs.jsonl"), output=str(tmp_path / "run"), batch_size=8)
    with pytest.raises(ValueError, match="mesh.pipe=2 needs a loss of single tokens.*use a mesh without pipe"):
        PreferSettings(**paths, mesh=MeshShape(pipe=2))
    with pytest.raises(ValueError, match="a micro-batch of 4 rows cannot be divided among data x fsdp x expert = 8 devices"):
        PreferSettings(**paths, gradient_accumulation=2, mesh=MeshShape(data=8))
    assert not (tmp_path / "run").exists()
