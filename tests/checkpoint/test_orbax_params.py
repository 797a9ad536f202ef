"""Parameters as Orbax: round trips keep every bit, and what does not fit is refused."""

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
from moe_jax.checkpoint.stored import stored_dtype
from moe_jax.config import Qwen3Config, Qwen3MoeConfig
from moe_jax.models.auto import from_config
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import MOE_SIZES, edit_config, parameters, read_weights, same_bits

DENSE_SIZES = {name: size for name, size in MOE_SIZES.items() if name in Qwen3Config.__dataclass_fields__}


def random_model(dtype, moe=True):
    config = Qwen3MoeConfig(**MOE_SIZES, mlp_only_layers=(1,)) if moe else Qwen3Config(**DENSE_SIZES, tie_word_embeddings=True)
    return from_config(config, dtype=dtype, rngs=nnx.Rngs(seeds.integer()))


@pytest.mark.parametrize("dtype, moe", [("float32", False), ("bfloat16", True)])
def test_round_trip_keeps_every_bit(tmp_path, dtype, moe):
    model = random_model(dtype, moe)
    save_orbax(model, tmp_path / "out")
    again = load_orbax(tmp_path / "out", dtype=dtype)
    assert again.config == model.config and again.dtype == model.dtype
    assert same_bits(parameters(again), parameters(model))


def test_param_dtype_is_cast_on_the_way(tmp_path):
    model = random_model("bfloat16")
    save_orbax(model, tmp_path / "out")
    again = load_orbax(tmp_path / "out", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert again.dtype == jnp.bfloat16
    assert same_bits(parameters(again), {path: array.astype("float32") for path, array in parameters(model).items()})


def test_saving_over_an_older_one_and_a_crash(tmp_path, monkeypatch):
    first, second = random_model("float32"), random_model("float32")
    save_orbax(first, tmp_path / "out")
    monkeypatch.setattr("moe_jax.checkpoint.companions.Companions.write", lambda self, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_orbax(second, tmp_path / "out")
    assert same_bits(parameters(load_orbax(tmp_path / "out", dtype="float32")), parameters(first))
    monkeypatch.undo()
    save_orbax(second, tmp_path / "out")
    assert same_bits(parameters(load_orbax(tmp_path / "out", dtype="float32")), parameters(second))


def test_parameters_that_do_not_fit_the_config_are_listed(tmp_path):
    save_orbax(random_model("float32"), tmp_path / "out")
    edit_config(tmp_path / "out", tie_word_embeddings=True, attention_bias=True, vocab_size=60)
    with pytest.raises(ValueError) as caught:
        load_orbax(tmp_path / "out")
    for part in (
        "lm_head.weight: unexpected",
        "stages.0.self_attn.q_proj.bias: missing",
        "embed_tokens.weight: shape [61, 16], expected [60, 16]",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("damaged", ["_METADATA", "manifest.ocdbt", "largest file"])
def test_damaged_parameters_are_one_error(tmp_path, damaged):
    save_orbax(random_model("float32", moe=False), tmp_path)
    files = [file for file in (tmp_path / "params").rglob("*") if file.is_file()]
    chosen = [file for file in files if file.name == damaged] or [max(files, key=lambda file: file.stat().st_size)]
    chosen[0].write_bytes(chosen[0].read_bytes()[: chosen[0].stat().st_size // 2])
    with pytest.raises(ValueError, match=r"params cannot be read, it is truncated or corrupt \("):
        stored_dtype(tmp_path)
        load_orbax(tmp_path)


def test_folders_without_parameters(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        load_orbax(tmp_path)
    save_orbax(random_model("float32"), tmp_path / "out")
    (tmp_path / "out" / "params").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no params/ in"):
        load_orbax(tmp_path / "out")


def test_from_hugging_face_and_back(moe_folder, tmp_path):
    (moe_folder / "tokenizer.json").write_text("{}")
    save_orbax(from_pretrained(moe_folder, dtype="float32"), tmp_path / "orbax")
    moe_jax.save_pretrained(load_orbax(tmp_path / "orbax", dtype="float32"), tmp_path / "hf")
    assert same_bits(read_weights(tmp_path / "hf"), read_weights(moe_folder))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_one_format_replaces_the_other(tmp_path):
    model = random_model("float32")
    moe_jax.save_pretrained(model, tmp_path / "out")
    save_orbax(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    moe_jax.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out" / "params").exists()
