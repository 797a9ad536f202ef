"""Fine-tuning with adapters: they alone are trained and saved, and a run resumes only with the same base and adapters."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora, load_adapter
from moe_jax.checkpoint.training import finished_steps
from moe_jax.layers.quantised import is_quantised
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import FinetuneSettings, dry_run, finetune
from moe_jax.recipes.run.folder import export
from moe_jax.train.metrics import read_records
from moe_jax.train.model_of_run import model_of_run
from tests.helpers import tiny
from tests.helpers.adapted_models import logits_of

LORA = LoraSettings(rank=4)
TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(tiny.biased_model(), folder / "model", tokenizer_from=folder / "tokenizer")
    return folder / "model"


def settings_of(folder, base, **changes) -> FinetuneSettings:
    options = dict(model=str(base), lora=LORA, steps=4, warmup_steps=0, min_learning_rate_ratio=1.0, checkpoint_every=2)
    return tiny.settings(folder, **options | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base, one_step_for_all):
    """(settings, result) of a run of four steps."""
    settings = settings_of(tmp_path_factory.mktemp("whole"), base)
    return settings, finetune(settings)


def other_model():
    return moe_jax.from_config(tiny.biased_model().config, rngs=nnx.Rngs(1), dtype=jnp.float32)


def losses(result) -> list[float]:
    return [(record["loss"], record["grad_norm"]) for record in result.metrics]


def test_adapters_alone_are_trained_and_saved(whole, base):
    settings, result = whole
    trained, before = result.model, moe_jax.from_pretrained(base, dtype=jnp.float32)
    assert losses(result)[-1] < losses(result)[0]
    weights = {path: a for path, a in nnx.to_flat_state(nnx.state(before))}
    kept = {path: a for path, a in nnx.to_flat_state(nnx.state(trained)) if path in weights}
    assert kept.keys() == weights.keys() and len(kept) > 10
    # Biases of experts among them: an adapter's file could not hold them.
    assert all(np.array_equal(kept[path], weights[path]) for path in weights)
    names = (Path(settings.output) / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert "gate_up_lora" in names and "embed_tokens" not in names and "gate_up_proj" not in names


def test_an_interrupted_run_goes_on_with_the_same_bits(whole, base, tmp_path):
    settings = settings_of(tmp_path, base)
    assert finetune(settings, stop_after=2).step == 2
    result = finetune(settings)
    assert losses(result) == losses(whole[1])
    for a, b in zip(*(jax.tree.leaves(nnx.state(model)) for model in (result.model, whole[1].model)), strict=True):
        assert np.array_equal(a, b)
    assert finished_steps(tmp_path / "run" / "checkpoints") == [2, 4]


def test_the_model_of_a_run_has_its_adapters(whole, base, tmp_path):
    settings, result = whole
    read = model_of_run(settings.output, dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(read, TOKENS), logits_of(result.model, TOKENS), rtol=1e-6, atol=1e-6)
    moved = model_of_run(settings.output, dtype=jnp.float32, step=2, base=base)
    assert not np.allclose(logits_of(moved, TOKENS), logits_of(result.model, TOKENS), rtol=1e-6, atol=1e-6)
    moe_jax.save_pretrained(other_model(), tmp_path / "other")
    with pytest.raises(ValueError, match="weights in .*other are not the base weights that the run's adapters were trained on"):
        model_of_run(settings.output, base=tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="the weights that the run's adapters belong to are not at .*gone"):
        model_of_run(settings.output, base=tmp_path / "gone")


@pytest.mark.thorough
def test_a_run_trains_whole_modules(base, tmp_path):
    """Optimizer and head resume bit for bit, and the adapter's folder holds the head."""
    lora = LoraSettings(rank=4, targets=("attention",), modules_to_save=("lm_head",))
    changes = dict(lora=lora, steps=2, checkpoint_every=1, optimizer="muon")
    whole, settings = finetune(settings_of(tmp_path / "whole", base, **changes)), settings_of(tmp_path, base, **changes)
    assert finetune(settings, stop_after=1).step == 1
    result = finetune(settings)
    for a, b in zip(*(jax.tree.leaves(nnx.state(run.model)) for run in (result, whole)), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(result.model.lm_head.weight[...], result.model.lm_head.original[...])
    read = [model_of_run(settings.output, dtype=jnp.float32), moe_jax.from_pretrained(base, dtype=jnp.float32)]
    export(result.model, settings)
    load_adapter(read[1], tmp_path / "run" / "adapter")
    for model in read:
        np.testing.assert_allclose(logits_of(model, TOKENS), logits_of(result.model, TOKENS), rtol=1e-6, atol=1e-6)


def test_another_base_or_other_adapters_are_another_run(whole, base, tmp_path, monkeypatch):
    settings, _ = whole
    monkeypatch.setattr("moe_jax.recipes.run.model.from_pretrained", None)
    moe_jax.save_pretrained(other_model(), tmp_path / "other", tokenizer_from=base)
    records = read_records(Path(settings.output) / "metrics.jsonl")
    for changes, message in (
        (dict(model=str(tmp_path / "other")), "holds another run.*model: its weights are not those that the run began with"),
        (dict(lora=replace(LORA, rank=8)), "holds another run.*Different: lora.rank: checkpoint 4, now 8$"),
        (dict(lora=None), "holds another run.*Different: lora: checkpoint a lora, now none.*"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune(replace(settings, steps=6, **changes))
    assert read_records(Path(settings.output) / "metrics.jsonl") == records


def test_refusals_come_before_weights_are_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_jax.recipes.run.model.from_pretrained", None)
    with pytest.raises(ValueError, match="weights='nf4' needs a mesh without pipe, which holds whole matrices: give 'whole'"):
        settings_of(tmp_path, base, mesh=MeshShape(pipe=2), gradient_accumulation=2, weights="nf4")
    with pytest.raises(ValueError, match="overlap_micro_batches=True is for runs without lora"):
        options = dict(mesh=MeshShape(data=2), gradient_accumulation=2, overlap_micro_batches=True)
        settings_of(tmp_path, base, lora=LoraSettings(targets=("attention",), dropout=0.1), **options)
    with pytest.raises(ValueError, match="dropout=0.1 is only for attention and mlp"):
        finetune(settings_of(tmp_path, base, lora=LoraSettings(dropout=0.1)))
    with pytest.raises(
        ValueError, match="LoraSettings: targets has 'all-linear', which this model does not have; it has attent"
    ):
        finetune(settings_of(tmp_path, base, lora=LoraSettings(targets=("all-linear",))))
    adapted = tiny.dense()
    add_lora(adapted, LORA, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the model has adapters already.*pass the model without adapters"):
        finetune(settings_of(tmp_path, base), model=adapted, tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rehearse", [False, True], ids=["run", "dry run"])
def test_forms_of_weights_are_checked_first(base, tmp_path, rehearse):
    """A form that the checkpoint cannot have is refused, by a rehearsal too, before a file is written."""
    start = dry_run if rehearse else finetune
    for weights, message in (
        ("nf4", r"experts.gate_up_proj: 16 is no multiple of 64, experts.down_proj: 16 is no multiple of 64; use 'whole'"),
        ("as stored", "this checkpoint has none"),
    ):
        with pytest.raises(ValueError, match=message):
            start(settings_of(tmp_path, base, weights=weights, dry_run=rehearse))
    assert not (tmp_path / "run").exists()


def test_defaults_depend_on_adapters(tmp_path):
    plain, adapted, in_f32 = (
        tiny.settings(tmp_path, learning_rate=None, dtype=dtype, lora=lora)
        for lora, dtype in ((None, "bfloat16"), (LORA, "bfloat16"), (LORA, "float32"))
    )
    assert (plain.learning_rate, plain.param_dtype) == (1e-5, "float32")
    assert (adapted.learning_rate, adapted.param_dtype) == (1e-4, "bfloat16")
    assert in_f32.param_dtype == "float32"


@pytest.mark.thorough
def test_quantised_base(tmp_path):
    """Adapters are trained on experts in 4 bits, and resume only with them."""
    sizes = dict(hidden_size=64, moe_intermediate_size=64)
    model = moe_jax.from_config(replace(tiny.biased_model().config, **sizes), rngs=nnx.Rngs(0))
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(model, tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    settings = settings_of(tmp_path, tmp_path / "base", weights="nf4")
    assert finetune(settings, stop_after=2).step == 2
    with pytest.raises(ValueError, match="weights: checkpoint 'nf4', now 'whole'"):
        finetune(replace(settings, weights="whole"))
    result = finetune(settings)
    assert is_quantised(nnx.state(result.model)) and losses(result)[-1] < losses(result)[0]
    with pytest.raises(ValueError, match="cannot be trained"):
        replace(settings, lora=None)
