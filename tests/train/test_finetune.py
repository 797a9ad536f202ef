"""The loop learns, logs, refuses nonsense, and stops at a loss that is not finite."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh

from moe_jax.parallel import Parallelism
from moe_jax.parallel.mesh import MESH_AXES, MeshShape
from moe_jax.plots import plot_run
from moe_jax.train import FinetuneSettings, batches, finetune, loss, open_documents
from moe_jax.train.finetune import _check_experts
from moe_jax.train.metrics import read_records


def settings(tmp_path, **changes):
    data = tiny.write_texts(tmp_path / "texts")
    options = dict(
        model="none", data=str(data), output=str(tmp_path / "run"), seq_len=32, batch_size=4, steps=30, learning_rate=2e-2,
        warmup_steps=2, dtype="float32",
    )  # fmt: skip
    return FinetuneSettings(**{**options, **changes})


@pytest.fixture
def steps_that_learn_nothing(monkeypatch):
    """For tests of what surrounds them, with models without experts: nothing is compiled."""
    numbers = "loss total_loss aux_loss sequence_loss z_loss grad_norm learning_rate num_tokens num_dropped"
    metrics = dict.fromkeys(numbers.split(), np.float32(1)) | {"expert_load": np.zeros((0, 0))}
    module = sys.modules["moe_jax.train.finetune"]
    monkeypatch.setattr(module, "make_train_step", lambda *_, **__: lambda state, batch: (state, metrics))


def test_the_loss_falls_and_every_step_is_logged(tmp_path):
    result = finetune(settings(tmp_path, sequence_loss_coef=1e-4), model=tiny.biased_model(), tokenizer=tiny.tokenizer())
    assert [record["step"] for record in result.metrics] == list(range(1, 31))
    assert result.metrics[-1]["loss"] < 0.6 * result.metrics[0]["loss"]
    assert set(result.metrics[0]) == {
        "step", "loss", "aux_loss", "sequence_loss", "z_loss", "grad_norm", "learning_rate", "tokens_per_second",
        "model_tflops", "max_mean_expert_load", "min_mean_expert_load", "num_dropped", "router_entropy", "num_rounds",
        "num_shadows", "max_expert_bias_range",
    }  # fmt: skip
    loads = read_records(tmp_path / "run" / "expert_load.jsonl")
    assert [record["step"] for record in loads] == list(range(1, 31))
    assert all(record["layers"] == [0, 1] and len(record["router_entropy"]) == 2 for record in loads)
    assert all(record["num_rounds"] == [1, 1] and record["num_shadows"] == [0, 0] for record in loads)
    bias = np.asarray(result.model.stages[0].mlp.router.expert_bias[...])
    np.testing.assert_allclose(loads[-1]["expert_bias_range"], np.stack([bias.min(axis=1), bias.max(axis=1)], axis=1))
    np.testing.assert_allclose(result.metrics[-1]["max_expert_bias_range"], np.ptp(bias, axis=1).max(), rtol=1e-6)
    assert result.metrics[-1]["sequence_loss"] > 0 and np.ptp(bias) > 0
    assert all(0 < sum(layer) <= 4 * 32 * 2 for record in loads for layer in record["expert_load"])
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.shape == (1, 4, 264)
    pictures = plot_run(tmp_path / "run", tmp_path / "pictures", step=2)
    assert [picture.name for picture in pictures] == ["loss.png", "expert_load.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_held_out_text_is_measured_and_not_trained_on(tmp_path):
    options = dict(steps=5, eval_data=str(tiny.write_texts(tmp_path / "held-out")), eval_every=2, eval_batches=3, batch_size=2)
    result = finetune(settings(tmp_path, **options), model=tiny.model(), tokenizer=tiny.tokenizer())
    found = {record["step"]: record["eval_loss"] for record in result.metrics if "eval_loss" in record}
    assert sorted(found) == [2, 4, 5] and found[5] < found[2]
    stream = batches(open_documents(options["eval_data"]), tiny.tokenizer(), seq_len=32, batch_size=2)
    parts = [loss(result.model, {name: jnp.asarray(a) for name, a in next(stream).items()})[1] for _ in range(3)]
    expected = sum(p.cross_entropy for p in parts) / sum(p.num_labels for p in parts)
    np.testing.assert_allclose(found[5], expected, rtol=1e-5)
    alone = finetune(
        settings(tmp_path, steps=5, batch_size=2, output=str(tmp_path / "alone")),
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
    )
    assert [record["loss"] for record in alone.metrics] == [record["loss"] for record in result.metrics]


def test_further_tokens_are_learned_and_logged_or_refused(tmp_path):
    model = tiny.deepseek(mtp=1, layers=1)
    with pytest.raises(ValueError, match="mtp_loss_coef=0 would leave the model's modules"):
        finetune(settings(tmp_path, mtp_loss_coef=0), model=model, tokenizer=tiny.tokenizer())
    result = finetune(settings(tmp_path, steps=12), model=model, tokenizer=tiny.tokenizer())
    losses = [record["mtp_loss"] for record in result.metrics]
    assert losses[-1] < 0.9 * losses[0] and result.model.config.num_nextn_predict_layers == 1
    assert len(read_records(tmp_path / "run" / "expert_load.jsonl")[0]["expert_load"]) == 1


def test_tensorboard_gets_every_scalar(tmp_path, capsys):
    finetune(settings(tmp_path, steps=2, warmup_steps=0, tensorboard=True), model=tiny.model(), tokenizer=tiny.tokenizer())
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert all(name in content for name in (b"loss", b"grad_norm", b"max_mean_expert_load"))
    assert "step 2: loss" in capsys.readouterr().out


def test_a_conversation_that_the_template_refuses_is_named_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["moe_jax.train.finetune"], "from_pretrained", None)
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer(
        "{% if messages[0]['content'] == 'a' %}{{ raise_exception('roles must alternate') }}{% endif %}" + tiny.CHATML
    ).save_pretrained(tmp_path / "model")
    chats = {name: tmp_path / f"{name}.jsonl" for name in ("good", "bad")}
    for asked, path in zip("ba", chats.values(), strict=True):
        path.write_text(json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "c"}]}))
    for data, eval_data in (("bad", None), ("good", "bad")):
        paths = dict(data=str(chats[data]), eval_data=eval_data and str(chats[eval_data]))
        with pytest.raises(ValueError, match="bad.jsonl:1 .*roles must alternate"):
            finetune(settings(tmp_path, model=str(tmp_path / "model"), **paths))
    assert not (tmp_path / "run").exists()
    # What a run leaves that ended before its first checkpoint.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="roles must alternate"):
        finetune(settings(tmp_path, model=str(tmp_path / "model"), data=str(chats["bad"])))


def test_steps_are_announced_where_there_are_any(tmp_path, capsys, steps_that_learn_nothing):
    for announced in (True, False):
        finetune(settings(tmp_path, steps=2), model=tiny.dense(), tokenizer=tiny.tokenizer())
        assert ("9 documents, 4 x 32 tokens a step on 1 device(s), steps " in capsys.readouterr().out) == announced


def test_a_checkpoint_that_was_never_finished_is_removed(tmp_path, steps_that_learn_nothing):
    (tmp_path / "run" / "checkpoints" / "1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    finetune(settings(tmp_path, steps=2), model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


def test_a_missing_package_is_named_before_anything_happens(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard=True needs the package tensorboardX"):
        settings(tmp_path, tensorboard=True)


def test_a_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    finetune(settings(tmp_path, steps=1, warmup_steps=0, output="~/run"), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1


def test_bf16_compute_keeps_f32_weights(tmp_path):
    model = tiny.model(dtype=jnp.bfloat16, param_dtype=jnp.float32)
    result = finetune(settings(tmp_path, dtype="bfloat16", steps=3), model=model, tokenizer=tiny.tokenizer())
    assert result.model.head_weight.dtype == jnp.float32
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.dtype == jnp.bfloat16


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_files(tmp_path):
    model = tiny.model()
    model.norm.weight[...] = jnp.full(16, jnp.nan)
    with pytest.raises(FloatingPointError, match=r"(?s)step 1: loss nan.*texts/\d\.txt"):
        finetune(settings(tmp_path), model=model, tokenizer=tiny.tokenizer())


def test_a_held_out_loss_that_is_not_finite_stops_too(tmp_path, monkeypatch, steps_that_learn_nothing):
    monkeypatch.setattr(sys.modules["moe_jax.train.finetune"], "make_evaluation", lambda *_, **__: lambda *_: float("nan"))
    held_out = dict(eval_data=str(tiny.write_texts(tmp_path / "held-out")), eval_every=1)
    with pytest.raises(FloatingPointError, match="step 1: the held-out loss nan is not finite"):
        finetune(settings(tmp_path, **held_out), model=tiny.dense(), tokenizer=tiny.tokenizer())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(6)])
    with pytest.raises(ValueError, match="the tokenizer has 265 tokens, and the model's vocabulary 264; take the model's own"):
        finetune(settings(tmp_path), model=tiny.model(), tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["shadow_experts", "rebalance_every"])
def test_what_needs_experts_on_several_devices_is_refused_on_one(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=1 needs experts on several devices: a mesh.expert of 2 or more"):
        finetune(settings(tmp_path, **{name: 1}), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_parameters_that_cannot_be_trained_are_refused(tmp_path):
    with pytest.raises(ValueError, match="parameters must be all float32 or all bfloat16 to be trained; there are float16"):
        finetune(settings(tmp_path), model=tiny.model(param_dtype=jnp.float16), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_is_not_the_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="settings.mesh=.*fsdp=2.*, but the model lies on .*fsdp=1.*; load it there"):
        finetune(settings(tmp_path, mesh=MeshShape(fsdp=2)), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_experts_that_devices_do_not_divide_are_refused(tmp_path):
    parallelism = Parallelism(AbstractMesh((1, 1, 3, 1), MESH_AXES))
    with pytest.raises(ValueError, match="4 experts cannot be dealt out to mesh.expert=3 devices; take a divisor"):
        _check_experts(settings(tmp_path), parallelism, tiny.model().config)


def test_forced_routing_and_experts_that_change_places_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="rebalance_every needs the router's own choices"):
        settings(tmp_path, rebalance_every=1, force_balanced_routing=True)


def test_experts_that_a_model_lacks_cannot_change_places(tmp_path):
    parallelism = Parallelism(AbstractMesh((1, 1, 2, 1), MESH_AXES))
    with pytest.raises(ValueError, match="rebalance_every=1 needs a model with experts"):
        _check_experts(settings(tmp_path, rebalance_every=1), parallelism, tiny.dense().config)


def test_all_wrong_settings_are_named_at_once(tmp_path):
    with pytest.raises(ValueError) as error:
        settings(
            tmp_path,
            steps=0,
            batch_size=-3,
            dtype="int8",
            learning_rate=0.0,
            data_format="csv",
            shadow_experts=-1,
            capacity_factor=0,
        )
    for part in (
        "steps=0",
        "batch_size=-3",
        "dtype='int8'",
        "learning_rate=0.0",
        "data_format='csv'",
        "shadow_experts=-1",
        "capacity_factor=0",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of gradient_accumulation=3"):
        settings(tmp_path, gradient_accumulation=3)
    with pytest.raises(ValueError, match="offload=True needs remat"):
        settings(tmp_path, offload=True, remat=False)
    for name in ("data", "eval_data"):
        with pytest.raises(ValueError, match=f"output='.*texts/run' must lie outside of {name}='.*texts', or"):
            settings(tmp_path, **{name: str(tmp_path / "texts"), "output": str(tmp_path / "texts" / "run")})
    with pytest.raises(ValueError, match="warmup_steps=31 must not exceed steps=30"):
        settings(tmp_path, warmup_steps=31)
