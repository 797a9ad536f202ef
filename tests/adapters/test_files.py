"""Adapter folders: `load_adapter` and PEFT read what `save_adapter` writes, we read PEFT's, and bad files change nothing."""

import json
import shutil
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import moe_jax
from moe_jax.adapters import load_adapter, save_adapter
from moe_jax.adapters.merge import changes_of, check_merged, merge_adapter
from moe_jax.adapters.names import factors_apart, modules_of, targets_of
from moe_jax.adapters.save import WEIGHTS_FILE
from moe_jax.adapters.source import CONFIG_FILE
from moe_jax.checkpoint.hf_names import export
from moe_jax.config.families import GptOssConfig
from moe_jax.layers.lora import has_adapters
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near, logits_of, small_model, with_adapters
from tests.helpers.hf_reference import load_ours, reference

CASES = {
    "dense": ("qwen3", {}, {"use_rslora": True, "ranks": {"q_proj": 5}}),
    "shared": ("qwen3_moe", {"mlp_only_layers": [1]}, {"shared_outer": True, "targets": ("experts", "mlp", "router")}),
    "deepseek": ("deepseek_v3", {"first_k_dense_replace": 1}, {"ranks": {"experts": 3}}),
}


@pytest.fixture(scope="module", params=["dense", "deepseek", pytest.param("shared", marks=pytest.mark.thorough)])
def adapted(request, tmp_path_factory):
    """(transformers' model, tokens, our logits with adapters, their folder)."""
    model_type, overrides, settings = CASES[request.param]
    rng = seeds.rng(request.param)
    hf = reference(model_type, int(rng.integers(2**31)), num_hidden_layers=2, **overrides)
    model, folder = with_adapters(load_ours(hf), **settings), tmp_path_factory.mktemp("adapted") / "adapter"
    tokens = rng.integers(0, 97, (2, 9))
    save_adapter(model, folder)
    return hf, tokens, logits_of(model, jnp.asarray(tokens)), folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{type: (a model without adapters, the folder of adapters for all of its matrices)}."""
    found = {}
    for model_type in ("qwen3", "qwen3_moe"):
        found[model_type] = small_model(model_type), tmp_path_factory.mktemp(model_type)
        save_adapter(with_adapters(nnx.clone(found[model_type][0])), found[model_type][1])
    return found


def test_read_back(adapted):
    hf, tokens, logits, folder = adapted
    model = load_ours(hf)
    load_adapter(model, folder)
    assert_near(logits_of(model, jnp.asarray(tokens)), logits, "logits", 1e-6)
    # Saving over an adapter replaces it; what is written again is the same change.
    save_adapter(model, folder)
    again = load_ours(hf)
    load_adapter(again, folder)
    for target, other in zip(targets_of(again), targets_of(model), strict=True):
        if other.found is not None:
            assert_near(target.found.change, other.found.change, target.path, 1e-6)


def test_one_alpha_over_rank(adapted):
    config = json.loads((adapted[-1] / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / config["r"]
    assert all(config["alpha_pattern"][name] / rank == pytest.approx(scale) for name, rank in config["rank_pattern"].items())
    assert "experts" not in config["target_modules"]
    assert all("experts" not in name or "shared_experts" in name for name in config["target_parameters"] or ())


@pytest.mark.filterwarnings("ignore")  # PEFT names ranks that it found by another name
def test_peft_loads_it(adapted):
    peft = pytest.importorskip("peft")
    hf, tokens, logits, folder = adapted
    model = peft.PeftModel.from_pretrained(deepcopy(hf), str(folder)).eval()
    with torch.no_grad():
        assert_near(model(torch.tensor(tokens)).logits.numpy(), logits, "logits")


def peft_fused(a, b):
    """[E, r, in] and [E, out, r] as PEFT writes them since 0.19."""
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def peft_018(a, b):
    return peft_fused(b.swapaxes(1, 2), a.swapaxes(1, 2))


def unsloth(a, b):
    return a.reshape(-1, a.shape[2]), b.transpose(1, 0, 2).reshape(b.shape[1], -1)


def shared_outer(a, b):
    """A factor that all experts share is written once."""
    return tuple(factor[:1] if (factor == factor[:1]).all() else factor for factor in (a, b))


FUSED = {"peft 0.21": peft_fused, "peft 0.18": peft_018, "unsloth": unsloth, "shared outer": shared_outer}


@pytest.mark.parametrize("is_shared, layouts", [(False, list(FUSED)[:3]), (True, ["shared outer"])], ids=["own", "shared"])
def test_fused_experts(is_shared, layouts, tmp_path):
    """Every layout gives the change that the experts' own factors give."""
    model = small_model("qwen3_moe")
    save_adapter(with_adapters(nnx.clone(model), targets=("experts",), shared_outer=is_shared), tmp_path / "apart")
    load_adapter(apart := nnx.clone(model), tmp_path / "apart")
    tensors = load_file(tmp_path / "apart" / WEIGHTS_FILE)

    def of(prefix, name, factor):
        return np.stack([tensors[f"{prefix}.{e}.{name}.lora_{factor}.weight"] for e in range(model.config.num_experts)])

    for layout in layouts:
        fused, folder = {}, tmp_path / layout
        for layer in range(model.config.num_hidden_layers):
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
            names = ("gate_proj", "up_proj", "down_proj")
            gate, up, down = ((of(prefix, name, "A"), of(prefix, name, "B")) for name in names)
            named = {".w1": gate, ".w3": up, ".w2": down}
            if not is_shared:
                named = {".base_layer": (gate[0], np.concatenate([gate[1], up[1]], axis=1)), "": down}
            for name, factors in named.items():
                for factor, array in zip("AB", FUSED[layout](*factors), strict=True):
                    fused[f"{prefix}{name}.lora_{factor}" + (".weight" if not is_shared else "")] = np.ascontiguousarray(array)
        folder.mkdir()
        save_file(fused, folder / WEIGHTS_FILE)
        shutil.copy(tmp_path / "apart" / CONFIG_FILE, folder)
        load_adapter(found := nnx.clone(model), folder, b_grouped_by_expert=layout == "unsloth")
        of_both = (jax.tree.leaves(nnx.state(each, nnx.LoRAParam)) for each in (found, apart))
        for one, other in zip(*of_both, strict=True):
            assert np.any(one)
            np.testing.assert_array_equal(one, other)


def test_square_experts():
    """Where both layouts of PEFT have one shape, its version decides."""
    model = small_model("qwen3_moe", moe_intermediate_size=32, hidden_size=32)
    parts = [part for part in modules_of(model) if part.layer == 0 and part.leaf == "down_proj"]
    a, b = (np.asarray(seeds.rng().normal(size=shape), np.float32) for shape in ((len(parts), 2, 32), (len(parts), 32, 2)))
    for version, write in (("0.18.1", peft_018), ("0.21.2", peft_fused)):
        found = factors_apart(*write(a, b), parts, version, False)
        for part in parts:
            np.testing.assert_array_equal(found[part.name][0], a[part.expert])
            np.testing.assert_array_equal(found[part.name][1], b[part.expert])
    with pytest.raises(ValueError, match="must have peft_version"):
        factors_apart(*peft_fused(a, b), parts, None, False)
    with pytest.raises(ValueError, match="fused experts have"):
        factors_apart(a[0], b[0], parts, "0.21.2", False)


def changed_config(**fields):
    def change(config, tensors):
        config.update(fields)

    return change


def renamed(config, tensors):
    for factor in "AB":
        own = tensors.pop(f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight")
        tensors[f"base_model.model.model.layers.7.self_attn.q_proj.lora_{factor}.weight"] = own


def unpaired(config, tensors):
    del tensors[next(name for name in tensors if "lora_B" in name)]


def transposed(config, tensors):
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def foreign(config, tensors):
    tensors["lm_head.weight"] = np.zeros((2, 2), np.float32)


def lost(config, tensors):
    for factor in "AB":
        del tensors[f"base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_{factor}.weight"]


BAD = {
    "must have a positive integer r and a number lora_alpha; got None and 9": changed_config(r=None, lora_alpha=9),
    "peft_type='IA3'": changed_config(peft_type="IA3"),
    "use_dora=True": changed_config(use_dora=True),
    "bias='all'": changed_config(bias="all"),
    "modules_to_save": changed_config(modules_to_save=["lm_head"]),
    "alora_invocation_tokens": changed_config(alora_invocation_tokens=[1, 2]),
    "use_qalora=True, lora_bias=True": changed_config(lora_bias=True, use_qalora=True),
    "init_lora_weights='pissa_niter_16'": changed_config(init_lora_weights="pissa_niter_16"),
    r"experts.5.up_proj has no factors. 1 of 16 modules": lost,
    "no module model.layers.7": renamed,
    "has no lora_B": unpaired,
    "they must be": transposed,
    "lm_head.weight is not a factor": foreign,
}


@pytest.mark.parametrize("message", BAD)
def test_bad_files(message, saved, tmp_path):
    model, folder = saved["qwen3_moe" if "experts" in message else "qwen3"]
    config, tensors = json.loads((folder / CONFIG_FILE).read_text()), load_file(folder / WEIGHTS_FILE)
    BAD[message](config, tensors)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert not has_adapters(model) and nnx.state(model, nnx.Param)


def test_experts_that_were_never_adapted(saved, tmp_path, caplog):
    """PEFT on transformers 5 takes the names of the experts' projections, and adapts none of them."""
    model, _ = saved["qwen3_moe"]
    save_adapter(with_adapters(nnx.clone(model), targets=("attention",)), tmp_path)
    load_adapter(nnx.clone(model), tmp_path)
    assert not caplog.records
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    for named in ("all-linear", ["q_proj", "up_proj"]):
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"target_modules": named}))
        load_adapter(nnx.clone(model), tmp_path)
        assert "up_proj, but no expert has factors: they were not trained" in caplog.text
        caplog.clear()


def test_files_that_name_no_modules_or_some(saved, tmp_path):
    model, _ = saved["qwen3"]
    save_adapter(with_adapters(nnx.clone(model), targets=("q_proj",)), tmp_path)
    config, tensors = json.loads((tmp_path / CONFIG_FILE).read_text()), load_file(tmp_path / WEIGHTS_FILE)
    # SkyRL names no modules.
    of_skyrl = {"target_modules": None, "rank_pattern": None, "alpha_pattern": None, "init_lora_weights": True}
    for fields, layers in (
        ({"layers_to_transform": [0]}, [0]),
        ({"layers_to_transform": 0}, [0]),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, [0]),
        (of_skyrl, [0, 1]),
    ):
        kept = {name: array for name, array in tensors.items() if any(f"layers.{layer}." in name for layer in layers)}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config | fields))
        save_file(kept, tmp_path / WEIGHTS_FILE)
        load_adapter(found := nnx.clone(model), tmp_path)
        (a,) = (target.found.a[...] for target in targets_of(found) if target.found is not None)
        assert [layer for layer in range(2) if np.any(a[layer])] == layers


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_cut_files(name, saved, tmp_path):
    model, folder = saved["qwen3"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for end in (0, 60, -10):
        (tmp_path / name).write_bytes((folder / name).read_bytes()[:end])
        with pytest.raises(ValueError, match=f"{tmp_path / name} (must hold a JSON object|cannot be read)"):
            load_adapter(model, tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=CONFIG_FILE):
        load_adapter(small_model("qwen3"), tmp_path)
    with pytest.raises(ValueError, match="no adapters to save"):
        save_adapter(small_model("qwen3"), tmp_path / "a")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=CONFIG_FILE):
        save_adapter(with_adapters(small_model("qwen3")), tmp_path)


def test_checkpoints_have_no_place_for_adapters(tmp_path):
    with pytest.raises(ValueError, match="merge them first"):
        moe_jax.save_pretrained(with_adapters(small_model("qwen3")), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_one_matrix_of_experts(tmp_path):
    """A file that changes the experts' second matrices alone is no adapter without experts."""
    hf, tokens = reference("qwen3_moe", seeds.integer(), num_hidden_layers=2), jnp.arange(12).reshape(2, 6)
    model = with_adapters(load_ours(hf), targets=("experts",))
    for target in targets_of(model):
        if target.weight == "gate_up_proj":
            target.found.b[...] = jnp.zeros_like(target.found.b[...])
    save_adapter(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / WEIGHTS_FILE)
    save_file({name: array for name, array in tensors.items() if "down_proj" in name}, tmp_path / "a" / WEIGHTS_FILE)
    found = load_ours(hf)
    load_adapter(found, tmp_path / "a")
    logits = logits_of(model, tokens)
    assert_near(logits_of(found, tokens), logits, "logits", 1e-6)
    nnx.update(found, jax.tree.map(jnp.zeros_like, nnx.state(found, nnx.LoRAParam)))
    assert np.abs(logits_of(found, tokens) - logits).max() > 1e-2


def test_changes_of_fused_experts_equal_a_merged_checkpoint(tmp_path):
    """gpt-oss: tensors of all experts, transposed, with gate and up in turn; the adapter's file comes back."""
    config = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    base = moe_jax.from_config(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    model = with_adapters(nnx.clone(base), targets=("attention", "experts"))
    save_adapter(model, tmp_path)
    load_adapter(again := nnx.clone(base), tmp_path)
    changes = changes_of(model)
    for found, wanted in zip(changes_of(again).values(), changes.values(), strict=True):
        np.testing.assert_allclose(found.b @ found.a, wanted.b @ wanted.a, atol=1e-6)
    of_base = [(name, np.array(array)) for name, array in export(config, dict(nnx.to_flat_state(nnx.state(base))))]
    merge_adapter(model)  # the base's matrices are donated
    assert check_merged(export(config, dict(nnx.to_flat_state(nnx.state(model)))), of_base, changes) < 1e-6
