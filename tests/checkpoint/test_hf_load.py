"""Loading: every layout of files gives the same parameters, and every bad checkpoint one error before anything is read."""

import json
import re
import sys
import tracemalloc
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

import moe_jax
from moe_jax.checkpoint import hf_files, hf_load, streaming
from moe_jax.checkpoint.hf_files import MAX_PROBLEMS_LISTED, CheckpointError
from moe_jax.checkpoint.hf_load import from_pretrained, read_config
from moe_jax.checkpoint.hf_names import export
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import (
    edit_config,
    fuse_experts,
    parameters,
    read_weights,
    rewrite_weights,
    same_bits,
    write_checkpoint,
)


def assert_holds(model, stored: dict[str, torch.Tensor]):
    """The model's parameters are the stored tensors, bit for bit."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    exported = dict(export(model.config, flat))
    assert exported.keys() == stored.keys()
    for name, array in exported.items():
        expected = stored[name]
        if expected.dtype == torch.bfloat16:
            assert array.dtype == ml_dtypes.bfloat16
            array, expected = array.view(np.int16), expected.view(torch.int16)
        np.testing.assert_array_equal(array, expected.numpy(), err_msg=name)


@pytest.mark.parametrize(
    "options, dtype",
    [
        (dict(moe=False, tie_word_embeddings=True), "float32"),
        (dict(mlp_only_layers=[1], attention_bias=True), "bfloat16"),
    ],
    ids=["dense", "moe"],
)
def test_sharded_checkpoint_loads_bit_for_bit(tmp_path, options, dtype):
    write_checkpoint(tmp_path, dtype=getattr(torch, dtype), shard="10KB", **options)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = from_pretrained(tmp_path, dtype=dtype)
    assert model.dtype == dtype and model.source == str(tmp_path)
    assert_holds(model, read_weights(tmp_path))


def test_logits_equal_transformers(tmp_path):
    reference = write_checkpoint(tmp_path, mlp_only_layers=[1])
    tokens = seeds.rng().integers(0, 61, (2, 9))
    ours = from_pretrained(tmp_path, dtype=jnp.float32)(jnp.asarray(tokens)).logits
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_one_file_and_many_without_an_index(moe_folder):
    stored = read_weights(moe_folder)
    (moe_folder / "model.safetensors.index.json").unlink()
    assert_holds(from_pretrained(moe_folder, dtype=jnp.float32), stored)
    rewrite_weights(moe_folder, stored)
    assert_holds(from_pretrained(moe_folder, dtype=jnp.float32), stored)


@pytest.mark.parametrize("layers", [(0,), (0, 2)])
def test_fused_experts(moe_folder, layers):
    stored = fused = read_weights(moe_folder)
    for layer in layers:
        fused = fuse_experts(fused, layer, num_experts=4)
    rewrite_weights(moe_folder, fused)
    assert_holds(from_pretrained(moe_folder, dtype=jnp.float32), stored)


@pytest.mark.parametrize("dtype, sharded", [("float32", False), ("bfloat16", True)])
def test_torch_files(moe_folder, dtype, sharded):
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read_weights(moe_folder).items()}
    rewrite_weights(moe_folder, stored)
    (moe_folder / "model.safetensors").unlink()
    if sharded:
        names = sorted(stored)
        files = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: stored[name] for name in names if files[name] == file}, moe_folder / file)
        (moe_folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(stored, moe_folder / "pytorch_model.bin")
    assert_holds(from_pretrained(moe_folder, dtype=dtype), stored)


def test_torch_files_without_torch_say_so(moe_folder, monkeypatch):
    stored = read_weights(moe_folder)
    rewrite_weights(moe_folder, stored)
    (moe_folder / "model.safetensors").unlink()
    torch.save(stored, moe_folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        from_pretrained(moe_folder)


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (print, ("executed",))


def test_torch_files_run_no_code(moe_folder, capsys):
    rewrite_weights(moe_folder, {})
    (moe_folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Harmful()}, moe_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin: cannot be read"):
        from_pretrained(moe_folder)
    assert "executed" not in capsys.readouterr().out


def test_param_dtype_differs_from_file_and_compute(moe_folder):
    model = from_pretrained(moe_folder, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert model.dtype == jnp.bfloat16
    assert_holds(model, read_weights(moe_folder))
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in read_weights(moe_folder).items()}
    assert_holds(from_pretrained(moe_folder), rounded)


def test_rotary_tables_and_a_tied_head_are_ignored(tmp_path):
    write_checkpoint(tmp_path, moe=False, tie_word_embeddings=True)
    stored = read_weights(tmp_path)
    extra = {
        "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4),
        "model.rotary_emb.inv_freq": torch.rand(4),
    }
    rewrite_weights(tmp_path, stored | extra)
    assert_holds(from_pretrained(tmp_path, dtype=jnp.float32), stored)


def test_a_stored_head_wins_over_the_configs_tie(tmp_path, caplog):
    """A head that differs from the embedding is loaded with one warning, though the config ties the two."""
    write_checkpoint(tmp_path, moe=False, tie_word_embeddings=True)
    stored = read_weights(tmp_path) | {"lm_head.weight": torch.randn(61, 16)}
    rewrite_weights(tmp_path, stored)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    assert not model.config.tie_word_embeddings and read_config(tmp_path) == model.config
    assert_holds(model, stored)
    assert caplog.text.count("lm_head.weight is no copy of model.embed_tokens.weight: both are loaded") == 1
    rewrite_weights(tmp_path, stored | {"lm_head.weight": torch.randn(60)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight: shape \[60\]"):
        from_pretrained(tmp_path)


def test_a_tied_embedding_may_be_stored_as_the_head_alone(tmp_path):
    write_checkpoint(tmp_path, moe=False, tie_word_embeddings=True)
    stored = read_weights(tmp_path)
    as_head = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in stored.items()}
    rewrite_weights(tmp_path, as_head)
    assert_holds(from_pretrained(tmp_path, dtype=jnp.float32), stored)


def test_a_checkpoint_of_the_model_without_a_head_loads(tmp_path):
    write_checkpoint(tmp_path, moe=False, tie_word_embeddings=True)
    stored = read_weights(tmp_path)
    rewrite_weights(tmp_path, {name.removeprefix("model."): tensor for name, tensor in stored.items()})
    assert_holds(from_pretrained(tmp_path, dtype=jnp.float32), stored)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="problems: 1\n  lm_head.weight: missing"):
        from_pretrained(tmp_path)


def test_mtp_modules_are_loaded_if_the_checkpoint_has_them(tmp_path, caplog):
    """`mtp=False` leaves them out. A save writes them back bit for bit. Missing, unexpected and differing tensors are named."""
    theirs = write_checkpoint(tmp_path, deepseek=True)
    stored = read_weights(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)  # transformers writes such a config without the module's tensors
    assert from_pretrained(tmp_path, dtype=jnp.float32).config.num_nextn_predict_layers == 0

    layer = {name.replace("layers.2.", "layers.3."): tensor + 1 for name, tensor in stored.items() if "layers.2." in name}
    shapes = {"enorm": (16,), "hnorm": (16,), "shared_head.norm": (16,), "eh_proj": (16, 32)}
    own = layer | {f"model.layers.3.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    shared = {"embed_tokens": stored["model.embed_tokens.weight"], "shared_head.head": stored["lm_head.weight"]}
    published = stored | own | {f"model.layers.3.{name}.weight": t.clone() for name, t in shared.items()}
    rewrite_weights(tmp_path, published)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    assert_holds(model, published)
    moe_jax.save_pretrained(model, tmp_path / "again")
    assert same_bits(read_weights(tmp_path / "again"), published)
    assert from_pretrained(tmp_path / "again").config == model.config
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")  # takes no notice of them
    assert same_bits(loaded.state_dict(), theirs.state_dict())
    without = from_pretrained(tmp_path, dtype=jnp.float32, mtp=False)
    assert without.config.num_nextn_predict_layers == 0
    assert read_config(tmp_path) == model.config and read_config(tmp_path, mtp=False) == without.config
    assert_holds(without, stored)
    assert not [record for record in caplog.records if record.name.startswith("moe_jax")]

    rewrite_weights(tmp_path, stored | own | {"model.layers.3.embed_tokens.weight": torch.randn(61, 16)})
    assert_holds(from_pretrained(tmp_path, dtype=jnp.float32), published)
    message = "model.layers.3.embed_tokens.weight is no copy of model.embed_tokens.weight, which is taken for both"
    assert [record.message.split(": ")[1] for record in caplog.records if record.name.startswith("moe_jax")] == [message]

    del own["model.layers.3.eh_proj.weight"]
    rewrite_weights(tmp_path, stored | own | {"model.layers.3.gate.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="eh_proj.weight: missing\n.*layers.3.gate.weight: unexpected"):
        from_pretrained(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="model.layers.3.enorm.weight: unexpected"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_the_bias_of_experts_is_f32_whatever_the_parameters_are(tmp_path, param_dtype):
    theirs = write_checkpoint(tmp_path, deepseek=True)
    ours = parameters(from_pretrained(tmp_path, dtype=jnp.bfloat16, param_dtype=param_dtype))
    bias = ours["stages", 1, "mlp", "router", "expert_bias"]
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias[1], theirs.model.layers[2].mlp.gate.e_score_correction_bias)


def test_large_tensors_are_read_in_chunks(moe_folder, monkeypatch):
    monkeypatch.setattr(streaming, "READ_CHUNK_BYTES", 100)
    assert_holds(from_pretrained(moe_folder, dtype=jnp.float32), read_weights(moe_folder))


def test_host_memory_stays_under_two_layers_of_one_parameter(tmp_path):
    write_checkpoint(tmp_path, num_hidden_layers=6, hidden_size=256, moe_intermediate_size=128, num_experts=8, shard="5MB")
    fused_layer = 8 * 2 * 128 * 256 * 4
    from_pretrained(tmp_path, dtype=jnp.float32)  # compiles, so that the tracer's objects are not counted below
    tracemalloc.start()  # counts what numpy and Python allocate; it does not see JAX's device buffers
    try:
        model = from_pretrained(tmp_path, dtype=jnp.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fused_layer < peak < 2 * fused_layer
    assert sum(array.nbytes for array in parameters(model).values()) > 9 * fused_layer


@pytest.mark.parametrize("layers, place", [((3,), (1,)), ((3, 1, 2), (1, 0, 1))], ids=["stacked", "in-chunks"])
def test_layers_are_written_in_place(layers, place):
    buffer = jnp.zeros((*layers, 64, 64))
    address = buffer.unsafe_buffer_pointer()
    written = streaming._write_layer(buffer, jnp.ones((*[1] * len(layers), 64, 64)), place)
    assert buffer.is_deleted() and written.unsafe_buffer_pointer() == address
    expected = np.zeros(layers)
    expected[place] = 64 * 64
    np.testing.assert_array_equal(written.sum((-2, -1)), expected)


def test_every_byte_is_read_once(moe_folder, monkeypatch):
    read, copy = [0], streaming._copy

    def counted_copy(stored, source, target):
        read[0] += target.nbytes
        copy(stored, source, target)

    monkeypatch.setattr(streaming, "_copy", counted_copy)
    model = from_pretrained(moe_folder, dtype=jnp.float32)
    assert read[0] == sum(array.nbytes for array in parameters(model).values())


def bad_missing(folder, stored):
    del stored["model.norm.weight"], stored["model.layers.0.mlp.experts.3.up_proj.weight"]
    rewrite_weights(folder, stored)
    return ["model.norm.weight: missing", "model.layers.0.mlp.experts.3.up_proj.weight: missing"]


def bad_unexpected(folder, stored):
    stored["model.layers.7.input_layernorm.weight"] = torch.ones(16)
    stored["model.layers.1.mlp.experts.0.gate_proj.weight"] = torch.ones(8, 16)
    rewrite_weights(folder, stored)
    return ["model.layers.7.input_layernorm.weight: unexpected", "model.layers.1.mlp.experts.0.gate_proj.weight: unexpected"]


def bad_both_fused_and_apart(folder, stored):
    rewrite_weights(folder, stored | fuse_experts(stored, 0, 4))
    return [f"model.layers.0.mlp.experts.{e}.{n}_proj.weight: unexpected" for e in range(4) for n in ("gate", "up", "down")]


def bad_shapes(folder, stored):
    stored["model.embed_tokens.weight"] = torch.ones(61, 15)
    stored["model.layers.2.mlp.gate.weight"] = torch.ones(5, 16)
    rewrite_weights(folder, stored)
    return [
        "model.embed_tokens.weight: shape [61, 15] in model.safetensors, expected [61, 16]",
        "model.layers.2.mlp.gate.weight: shape [5, 16] in model.safetensors, expected [4, 16]",
    ]


def bad_dtypes(folder, stored):
    stored["model.norm.weight"] = torch.ones(16, dtype=torch.int32)
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    rewrite_weights(folder, stored)
    return ["model.norm.weight: dtype I32", "lm_head.weight: dtype F8_E4M3 in model.safetensors, expected one of"]


def bad_truncated(folder, stored):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return ["model-00002-of-00003.safetensors: cannot be read, it is truncated or corrupt"]


def bad_header(folder, stored):
    file = folder / "model-00001-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\x00}{"
    file.write_bytes(content)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    return [f"model-0000{i}-of-00003.safetensors: cannot be read, it is truncated or corrupt" for i in (1, 3)]


def bad_absent_file(folder, stored):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return ["model-00002-of-00003.safetensors: missing, but model.safetensors.index.json names it"]


def bad_index_content(folder, stored):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["model.embed_tokens.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    return [
        "model.norm.weight: not in model-00001-of-00003.safetensors",
        "names '../elsewhere.safetensors', which is not a file name",
    ]


def bad_index_forgets(folder, stored):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    return ["model.norm.weight: in model-0000"]


def bad_index_json(folder, stored):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.norm')
    return ["model.safetensors.index.json: not an index"]


def bad_no_weights(folder, stored):
    rewrite_weights(folder, {})
    (folder / "model.safetensors").unlink()
    return ["no weight files"]


BAD = [value for name, value in list(globals().items()) if name.startswith("bad_")]


@pytest.mark.parametrize("spoil", BAD, ids=lambda function: function.__name__)
def test_bad_checkpoints_are_refused_before_anything_is_read(tmp_path, monkeypatch, spoil):
    write_checkpoint(tmp_path, mlp_only_layers=[1], shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    offenders = spoil(tmp_path, read_weights(tmp_path))

    def not_reached(*args, **options):
        raise AssertionError("device memory was taken")

    monkeypatch.setattr(hf_load.streaming, "load_parameter", not_reached)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(tmp_path)
    for offender in offenders:
        assert sum(offender in problem for problem in caught.value.problems) == 1, str(caught.value)
        assert offender in str(caught.value)
    if spoil in (bad_missing, bad_unexpected, bad_both_fused_and_apart, bad_shapes, bad_dtypes):
        assert len(caught.value.problems) == len(offenders)


def test_truncated_torch_file(moe_folder):
    stored = read_weights(moe_folder)
    rewrite_weights(moe_folder, {})
    (moe_folder / "model.safetensors").unlink()
    torch.save(stored, moe_folder / "pytorch_model.bin")
    content = (moe_folder / "pytorch_model.bin").read_bytes()
    (moe_folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="pytorch_model.bin: cannot be read"):
        from_pretrained(moe_folder)


def test_long_lists_of_problems_are_cut(moe_folder):
    rewrite_weights(moe_folder, {"model.norm.weight": torch.ones(16)})
    with pytest.raises(CheckpointError, match=r"\.\.\. and \d+ more") as caught:
        from_pretrained(moe_folder)
    assert len(str(caught.value).splitlines()) == MAX_PROBLEMS_LISTED + 2
    assert len(caught.value.problems) > MAX_PROBLEMS_LISTED


def test_unknown_model_type_and_fields(moe_folder):
    edit_config(moe_folder, wild_field=1)
    with pytest.raises(ValueError, match="wild_field"):
        from_pretrained(moe_folder)
    edit_config(moe_folder, model_type="deepseek_v99")
    with pytest.raises(ValueError, match=re.escape("model_type 'deepseek_v99' is not supported")):
        from_pretrained(moe_folder)


def test_neither_a_folder_nor_a_hub_id(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a folder with a checkpoint nor a model"):
        from_pretrained(tmp_path / "nothing" / "here")


def test_a_runs_folder_is_no_model_but_names_the_one_in_it(moe_folder):
    run = moe_folder.rename(moe_folder.with_name("model")).parent
    for load in (from_pretrained, read_config):
        with pytest.raises(FileNotFoundError, match=f"did you mean the model in it, {re.escape(str(run / 'model'))}?"):
            load(run)


@pytest.mark.parametrize("step", [None, 7])
def test_a_run_that_is_not_finished(tmp_path, step):
    (tmp_path / "checkpoints").mkdir()
    if step is not None:
        (tmp_path / "checkpoints" / str(step)).mkdir()
        (tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").touch()
    newest = "without a checkpoint" if step is None else "whose newest checkpoint is of step 7"
    with pytest.raises(FileNotFoundError, match=f"of a run that is not finished,? {newest}: the command that began") as error:
        read_config(tmp_path)
    assert (f"moe-jax convert {tmp_path} TARGET" in str(error.value)) == (step is not None)


@pytest.mark.parametrize(
    "error, message",
    [
        (RepositoryNotFoundError, r"nor a model on the Hugging Face hub \(a private one needs `hf auth login` or HF_TOKEN\)$"),
        (GatedRepoError, "terms must be accepted on https://huggingface.co/someone/some-model; then log in"),
        (HfHubHTTPError, "that can be reached: no route$"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(error, message, monkeypatch):
    def snapshot_download(name, **options):
        raise error("no route\nPlease try again.", response=Mock())

    monkeypatch.setattr(hf_files.huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=message):
        from_pretrained("someone/some-model")


def test_the_hub_gives_torch_files_only_as_a_last_resort(moe_folder, monkeypatch):
    """A refused config ends the load before any weights are downloaded."""
    stored = read_weights(moe_folder)
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        weights = [pattern for pattern in allow_patterns if pattern in ("*.safetensors", "*.bin")]
        asked.append((name, *weights))
        return str(moe_folder)

    monkeypatch.setattr(hf_files.huggingface_hub, "snapshot_download", snapshot_download)
    model = from_pretrained("someone/some-model", dtype=jnp.float32)
    assert asked == [("someone/some-model",), ("someone/some-model", "*.safetensors")]
    assert_holds(model, stored)
    rewrite_weights(moe_folder, {})
    (moe_folder / "model.safetensors").unlink()
    torch.save(stored, moe_folder / "pytorch_model.bin")
    assert_holds(from_pretrained("someone/some-model", dtype=jnp.float32), stored)
    assert [weights for _, *weights in asked[2:]] == [[], ["*.safetensors"], ["*.bin"]]

    for refused in (dict(quantization_config={"quant_method": "hqq"}), dict(model_type="llama")):
        asked.clear()
        edit_config(moe_folder, **refused)
        for load in (from_pretrained, read_config):
            with pytest.raises(ValueError, match="hqq|llama"):
                load("someone/some-model")
        assert asked == [("someone/some-model",)] * 2  # and no weights


def test_no_random_weights_are_made(moe_folder, monkeypatch):
    expected = parameters(from_pretrained(moe_folder))
    made = []
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: made.append(type(key)) or jnp.zeros(shape, dtype))
    assert same_bits(parameters(from_pretrained(moe_folder)), expected)
    assert made and all(issubclass(kind, jax.core.Tracer) for kind in made)


def test_progress_bar_is_silent_when_not_on_a_terminal(moe_folder, capfd):
    from_pretrained(moe_folder, progress=True)
    assert capfd.readouterr().err == ""


def test_float_dtypes_have_the_names_of_safetensors():
    assert {name: dtype.itemsize for name, dtype in hf_files.FLOAT_DTYPES.items()} == {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
