"""Adapters of the embedding and the head: files that PEFT reads, merging, and tied tables."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora, load_adapter, merge_adapter, save_adapter, without_adapter
from moe_jax.adapters.load import check_adapter
from moe_jax.adapters.merge import changes_of, check_merged
from moe_jax.adapters.names import targets_of
from moe_jax.adapters.token_rows import EMBEDDING, HEAD
from moe_jax.checkpoint.hf_names import export
from moe_jax.train import init_state, make_train_step
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near, logits_of, make_batch, small_model, with_adapters
from tests.helpers.hf_reference import load_ours, reference

TARGETS = ("q_proj", "embed_tokens", "head")


def tensors_of(model):
    return export(model.config, dict(nnx.to_flat_state(nnx.state(model))))


@pytest.mark.filterwarnings("ignore")
def test_files(tmp_path):
    """PEFT computes the same logits, and so does what is read back and merged; generation reads the wider head."""
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3", seeds.integer(), num_hidden_layers=2), seeds.rng().integers(0, 97, (2, 9))
    of, base = (lambda model: logits_of(model, jnp.asarray(tokens))), load_ours(hf)
    model = with_adapters(nnx.clone(base), targets=("attention", *TARGETS), ranks={"head": 3})
    logits = of(model)
    save_adapter(model, tmp_path / "a")
    read = load_ours(hf)
    load_adapter(read, tmp_path / "a")
    assert_near(of(read), logits, "read", 1e-6)
    changes = changes_of(read)
    assert changes.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}
    new = moe_jax.generate(read, tokens[0].tolist(), max_new_tokens=4)
    largest = logits_of(read, jnp.asarray([[*tokens[0], *new]]))[0, len(tokens[0]) - 1 : -1].argmax(axis=-1)
    np.testing.assert_array_equal(new, largest)
    merge_adapter(read)
    assert_near(of(read), logits, "merged")
    check_merged(tensors_of(read), tensors_of(base), changes)
    assert np.abs(of(without_adapter(model)) - of(base)).max() == 0
    theirs = peft.PeftModel.from_pretrained(hf, str(tmp_path / "a")).eval()
    with torch.no_grad():
        assert_near(theirs(torch.tensor(tokens)).logits.numpy(), logits, "logits of PEFT")


@pytest.mark.filterwarnings("ignore")
def test_files_of_peft(tmp_path):
    """PEFT writes the frozen tables with their factors. They are compared with the model's, in the narrower dtype of both."""
    peft = pytest.importorskip("peft")
    hf, tokens = reference("qwen3", seeds.integer(), num_hidden_layers=1), seeds.rng().integers(0, 97, (2, 9))
    model = load_ours(hf)
    theirs = peft.get_peft_model(
        hf, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head", "embed_tokens"])
    )
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_" in name:
                factor.normal_(0, 0.1)
        logits = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    theirs.save_pretrained(tmp_path)
    read = nnx.clone(model)
    load_adapter(read, tmp_path)
    assert_near(logits_of(read, jnp.asarray(tokens)), logits, "logits of PEFT")

    file = tmp_path / "adapter_model.safetensors"
    tensors, names = load_file(file), [f"base_model.model.{module}.base_layer.weight" for module in (EMBEDDING, HEAD)]
    check_adapter(model.config, tmp_path)
    for dtype in (ml_dtypes.bfloat16, np.float32):
        # PEFT writes these tables of a model in bf16, and of one in f32 that was read from bf16.
        in_bf16 = {name: tensors[name].astype(ml_dtypes.bfloat16).astype(dtype) for name in names}
        save_file(tensors | in_bf16, file)
        load_adapter(nnx.clone(model) if dtype != np.float32 else cast(nnx.clone(model), jnp.bfloat16), tmp_path)
    for name in names:
        for changed in (tensors[name] * np.float32(1.01), np.concatenate([tensors[name], tensors[name][:3]])):
            save_file(tensors | {name: changed}, file)
            with pytest.raises(
                ValueError, match=f"{name} .{len(changed)}, 32. differs from the model's .97, 32.: the vocabulary"
            ):
                load_adapter(model, tmp_path)
    # `save_embedding_layers=True` names tables that have no factors otherwise.
    whole = {name.replace(".base_layer", ""): tensors[name] for name in names}
    save_file({name: array for name, array in tensors.items() if "q_proj" in name} | whole, file)
    load_adapter(model, tmp_path)


def cast(model, dtype):
    nnx.update(model, jax.tree.map(lambda a: a.astype(dtype), nnx.state(model)))
    return model


def test_training():
    model, optimizer, batch = small_model("qwen3"), optax.adamw(1e-2), make_batch()
    summary = add_lora(model, LoraSettings(rank=4, targets=("embedding", "head")), rngs=nnx.Rngs(0))
    assert "without an adapter: mlp, attention" in str(summary) and set(summary.kinds) == {"embedding", "head"}
    state, step = init_state(model, optimizer), make_train_step(nnx.graphdef(model), optimizer)
    losses = []
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1


def test_tied_tables(tmp_path):
    model = small_model("qwen3", tie_word_embeddings=True)
    for name in ("head", "embed_tokens"):
        with pytest.raises(ValueError, match=f"{name} cannot have an adapter: the model's head and embedding share one matrix"):
            add_lora(model, LoraSettings(targets=("attention", name)), rngs=nnx.Rngs(0))
    assert {target.kind for target in targets_of(model)} == {"attention", "mlp"}
    save_adapter(with_adapters(nnx.clone(model), targets=("q_proj",)), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tables = dict.fromkeys(
        (f"base_model.model.{name}.weight" for name in (EMBEDDING, HEAD)), np.asarray(model.embed_tokens.weight[...])
    )
    save_file(load_file(file) | tables, file)
    load_adapter(nnx.clone(model), tmp_path)
    factors = {f"base_model.model.lm_head.lora_{name}.weight": np.ones((1, 1), np.float32) for name in "AB"}
    save_file(load_file(file) | factors, file)
    with pytest.raises(
        ValueError, match="no module lm_head that an adapter can change; its head and embedding share one matrix"
    ):
        load_adapter(model, tmp_path)
