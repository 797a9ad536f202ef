"""Modules that are trained whole along with adapters: PEFT's files, merging, references, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.adapters import (
    LoraSettings,
    add_lora,
    load_adapter,
    load_adapters,
    merge_adapter,
    save_adapter,
    without_adapter,
)
from moe_jax.adapters.add import planned_lora
from moe_jax.adapters.merge import changes_of, check_merged
from moe_jax.adapters.names import whole_modules
from moe_jax.checkpoint.hf_names import export
from moe_jax.train import init_state, make_optimizer, make_train_step
from tests.helpers import seeds, tiny
from tests.helpers.adapted_models import assert_near, logits_of, make_batch, small_model, with_adapters
from tests.helpers.hf_reference import load_ours, reference

WHOLE = ("lm_head", "embed_tokens", "gate", "norm")


def changed(model, names=WHOLE):
    """The model with adapters, and with other numbers in modules that are trained whole."""
    model, rng = with_adapters(model, targets=("attention",), modules_to_save=names), seeds.rng()
    for each in whole_modules(model):
        if each.is_trained:
            weight = each.module.weight
            weight[...] = weight[...] + jnp.asarray(rng.normal(0, 0.02, weight.shape), jnp.float32)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [WHOLE, pytest.param(("model.norm", "lm_head"), marks=pytest.mark.thorough)])
def test_files_that_peft_reads(names, tmp_path):
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3_moe", seeds.integer(), num_hidden_layers=2), seeds.rng().integers(0, 97, (2, 9))
    of, base = (lambda model: logits_of(model, jnp.asarray(tokens))), load_ours(hf)
    model = changed(nnx.clone(base), names)
    logits = of(model)
    save_adapter(model, tmp_path / "a")
    read = load_ours(hf)
    load_adapter(read, tmp_path / "a")
    assert_near(of(read), logits, "read", 1e-6)
    assert {each.name for each in whole_modules(read) if each.is_trained} == {each.name for each in whole_modules(read, names)}
    changes = changes_of(read)
    merge_adapter(read)
    assert_near(of(read), logits, "merged")
    tensors = [export(each.config, dict(nnx.to_flat_state(nnx.state(each)))) for each in (read, base)]
    check_merged(*tensors, changes)
    assert np.abs(of(without_adapter(model)) - of(base)).max() == 0
    theirs = peft.PeftModel.from_pretrained(hf, str(tmp_path / "a")).eval()
    with torch.no_grad():
        assert_near(theirs(torch.tensor(tokens)).logits.numpy(), logits, "logits of PEFT")


@pytest.mark.filterwarnings("ignore")
def test_files_that_peft_writes(tmp_path):
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3_moe", seeds.integer(), num_hidden_layers=2), seeds.rng().integers(0, 97, (2, 9))
    model = load_ours(hf)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=list(WHOLE))
    theirs = peft.get_peft_model(hf, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
        logits = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    theirs.save_pretrained(tmp_path)
    load_adapter(model, tmp_path)
    assert_near(logits_of(model, jnp.asarray(tokens)), logits, "logits of PEFT")


def test_only_they_and_adapters_are_trained():
    model = small_model("qwen3_moe")
    base, summary = (
        nnx.state(nnx.clone(model)),
        add_lora(model, LoraSettings(rank=2, targets=("attention",), modules_to_save=("lm_head", "gate")), rngs=nnx.Rngs(0)),
    )
    vocab, hidden = model.lm_head.weight.shape
    assert summary.kinds["lm_head"].parameters == vocab * hidden and "(whole)" in str(summary)
    assert summary.parameters == sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    optimizer = make_optimizer(1e-2)
    state, _ = make_train_step(nnx.graphdef(model), optimizer)(init_state(model, optimizer), make_batch())
    after = nnx.merge(nnx.graphdef(model), state.params, state.fixed)
    for _ in range(2):
        # The reference is the base, whose weights no step donates.
        for path, array in nnx.to_flat_state(base):
            found = dict(nnx.to_flat_state(nnx.state(without_adapter(after))))[path]
            assert (found[...] == array[...]).all(), path
    assert not (after.lm_head.weight[...] == base["lm_head"]["weight"][...]).all()


def test_the_plan_counts_them():
    settings = LoraSettings(rank=2, targets=("attention",), modules_to_save=("lm_head",))
    planned = planned_lora(tiny.model().config, settings)
    assert sum(np.prod(shape) for _, shape in planned.factors) == planned.summary.parameters


@pytest.mark.parametrize(
    "make, settings, message",
    [
        (
            tiny.model,
            dict(modules_to_save=("q_proj",)),
            "modules_to_save has 'q_proj', which this model cannot train whole; it can train embed_tokens, gate",
        ),
        (tiny.model, dict(targets=("head",), modules_to_save=("lm_head",)), "lm_head is in targets and in modules_to_save"),
        (
            lambda: small_model("qwen3", tie_word_embeddings=True),
            dict(modules_to_save=("lm_head",)),
            "has 'lm_head', which this",
        ),
    ],
)
def test_refused_settings(make, settings, message):
    model = make()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraSettings(**settings), rngs=nnx.Rngs(0))
    assert nnx.graphdef(model) == before


def test_refused_files(tmp_path):
    model = small_model("qwen3_moe")
    save_adapter(changed(nnx.clone(model), ("lm_head",)), tmp_path / "a")
    with pytest.raises(ValueError, match="'one' has modules_to_save, which cannot be switched"):
        load_adapters(nnx.clone(model), {"one": tmp_path / "a"})
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    for names, message in (
        (["q_proj"], "cannot train whole: only norms"),
        (["lm_head", "gate"], "gate.weight is missing"),
    ):
        file.write_text(json.dumps(config | {"modules_to_save": names}))
        with pytest.raises(ValueError, match=message):
            load_adapter(nnx.clone(model), tmp_path / "a")
