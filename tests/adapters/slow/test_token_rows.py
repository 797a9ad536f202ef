"""Rows of tokens that are trained alone along with adapters: PEFT's files, gradients, merging, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, load_adapter, load_adapters, merge_adapter, save_adapter, without_adapter
from moe_jax.adapters.merge import changes_of, check_merged
from moe_jax.adapters.token_rows import extend_vocabulary, trained_tables
from moe_jax.checkpoint.hf_names import export
from moe_jax.train import loss
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near, logits_of, make_batch, randomise, small_model
from tests.helpers.hf_reference import load_ours, reference

TOKENS = (98, 3, 97)
"""A token of the vocabulary, and two new ones."""


def with_rows(model, tokens=TOKENS, **settings):
    """Adds adapters, and draws them and the rows of these tokens anew."""
    settings = LoraSettings(rank=2, targets=("attention",), trainable_token_indices=tokens, **settings)
    add_lora(model, settings, rngs=nnx.Rngs(0))
    randomise(model)
    for table in trained_tables(model).values():
        table.token_rows.rows[...] += jnp.asarray(seeds.rng().normal(0, 0.3, table.token_rows.rows.shape), jnp.float32)
    return model


def tokens_with_new_ones():
    return jnp.asarray(seeds.rng().integers(0, 97, (2, 9))).at[0, 2].set(98).at[1, 1].set(97).at[1, 5].set(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_files_that_peft_reads(tied, tmp_path):
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3", seeds.integer(), num_hidden_layers=1, tie_word_embeddings=tied), tokens_with_new_ones()
    base = load_ours(hf)
    model = with_rows(nnx.clone(base))
    logits = logits_of(model, tokens)
    save_adapter(model, tmp_path / "a")
    read = load_ours(hf)
    load_adapter(read, tmp_path / "a")
    assert_near(logits_of(read, tokens), logits, "read", 1e-6)
    changes = changes_of(read)
    merge_adapter(read)
    assert read.config.vocab_size == 99
    assert_near(logits_of(read, tokens), logits, "merged")
    extend_vocabulary(base, 99)
    check_merged(*(export(each.config, dict(nnx.to_flat_state(nnx.state(each)))) for each in (read, base)), changes)
    assert np.abs(logits_of(without_adapter(model), tokens) - logits_of(base, tokens)).max() == 0
    hf.resize_token_embeddings(99)
    theirs = peft.PeftModel.from_pretrained(hf, str(tmp_path / "a")).eval()
    with torch.no_grad():
        assert_near(theirs(torch.tensor(np.asarray(tokens))).logits.numpy(), logits, "logits of PEFT")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied, both", [(False, True), pytest.param(False, False, marks=pytest.mark.thorough), (True, True)])
def test_files_that_peft_writes(tied, both, tmp_path):
    """A base on disk whose vocabulary was extended makes PEFT write its tables too."""
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3", seeds.integer(), num_hidden_layers=1, tie_word_embeddings=tied), tokens_with_new_ones()
    model = load_ours(hf)
    hf.save_pretrained(tmp_path / "base")
    hf.name_or_path = str(tmp_path / "base")
    hf.resize_token_embeddings(99)
    indices = {"embed_tokens": list(TOKENS), "lm_head": list(TOKENS)} if both and not tied else list(TOKENS)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], trainable_token_indices=indices)
    theirs = peft.get_peft_model(hf, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        logits = theirs.eval()(torch.tensor(np.asarray(tokens))).logits.numpy()
    theirs.save_pretrained(tmp_path / "a")
    load_adapter(model, tmp_path / "a")
    assert_near(logits_of(model, tokens), logits, "logits of PEFT")
    save_adapter(model, tmp_path / "b")
    written, ours = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in "ab")
    assert written["trainable_token_indices"] == ours["trainable_token_indices"]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_rows_of_the_tables(tied):
    model = small_model("qwen3", num_hidden_layers=1, tie_word_embeddings=tied)
    extend_vocabulary(model, 99)
    batch = make_batch(vocab=99)
    batch["tokens"] = batch["tokens"].at[0, :3].set(jnp.array(TOKENS))

    def gradients(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return jax.jit(jax.grad(lambda params: loss(nnx.merge(graph, params, rest), batch)[0]))(params)

    whole = gradients(model)
    add_lora(model, LoraSettings(rank=2, trainable_token_indices=TOKENS), rngs=nnx.Rngs(0))
    alone = gradients(model)
    for name in ("embed_tokens",) if tied else ("embed_tokens", "lm_head"):
        rows, table = alone[name]["token_rows"]["rows"][...], whole[name]["weight"][...]
        assert_near(rows, table[jnp.array(TOKENS)], name)


def test_new_rows_are_the_mean(rng):
    model = small_model("qwen3", num_hidden_layers=1)
    table = np.asarray(model.lm_head.weight[...])
    extend_vocabulary(model, 99, at_mean=(90, 97))
    found = np.asarray(model.lm_head.weight[...])
    for row in (90, 97, 98):
        np.testing.assert_allclose(found[row], table.mean(0), atol=1e-6)
    assert (np.delete(found[:97], 90, 0) == np.delete(table, 90, 0)).all()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(trainable_token_indices=(3, 3)), "trainable_token_indices has the token 3 twice"),
        (
            dict(trainable_token_indices=(97, 99)),
            "the token 99, which is not in the vocabulary of 97; new tokens must be numbered",
        ),
        (dict(trainable_token_indices=(-1,)), "integers of at least 0; got -1"),
        (
            dict(trainable_token_indices=(1,), modules_to_save=("lm_head",)),
            "lm_head has trainable_token_indices and is trained",
        ),
        (dict(trainable_token_indices=(1,), targets=("embedding",)), "model.embed_tokens has trainable_token_indices and is"),
    ],
)
def test_refused_settings(settings, message):
    model = small_model("qwen3", num_hidden_layers=1)
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraSettings(**settings), rngs=nnx.Rngs(0))
    assert nnx.graphdef(model) == before


def test_refused_files(tmp_path):
    model = small_model("qwen3", num_hidden_layers=1)
    save_adapter(with_rows(nnx.clone(model)), tmp_path)
    with pytest.raises(ValueError, match="'one' has trainable_token_indices, which cannot be switched"):
        load_adapters(nnx.clone(model), {"one": tmp_path})
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for indices, message in (
        ([3], r"must have the shape \(1, 32\); the file has \(3, 32\)"),
        ({"q_proj": [3]}, "'q_proj', which is no table of the vocabulary"),
        ({"embed_tokens": list(TOKENS)}, "has no trainable_token_indices for lm_head"),
    ):
        file.write_text(json.dumps(config | {"trainable_token_indices": indices}))
        with pytest.raises(ValueError, match=message):
            load_adapter(nnx.clone(model), tmp_path)
