"""Experts in FP8 on several devices: the places of their codes, their results, generation and the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import moe_jax
from moe_jax.checkpoint import streaming
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.cli import main
from moe_jax.config import NAMED_CONFIGS
from moe_jax.kernels import Precision, experts_mlp, quantise_matrices
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import BlockScaled, is_quantised
from moe_jax.parallel import ExpertParallel, expert_parallel_mlp
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny
from tests.helpers.checkpoint_helpers import multiplying_in_fp8, parameters, same_bits, write_checkpoint, write_fp8
from tests.helpers.meshes import make_mesh, relative_error

LIMITS = EngineLimits(max_sequences=1, max_tokens_per_step=16, max_chunks_per_step=1, max_length=64, num_pages=4)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder whose projections are in FP8; four experts."""
    folder = tmp_path_factory.mktemp("stored")
    write_fp8(folder, vocab_size=264)
    return folder


@pytest.fixture(scope="module")
def model(stored):
    return multiplying_in_fp8(stored)


@pytest.fixture(scope="module")
def spread(stored):
    """The same model on two devices."""
    return multiplying_in_fp8(stored, mesh=make_mesh(fsdp=2))


def codes_of(model):
    experts = model.stages[0].mlp.experts
    return [matrix.get_value() for matrix in (experts.gate_up_proj, experts.down_proj)]


def test_each_device_has_its_experts(model, spread):
    for ours, expected in zip(codes_of(spread), codes_of(model), strict=True):
        assert isinstance(ours, BlockScaled)
        for part, whole in ((ours.codes, expected.codes), (ours.scales, expected.scales)):
            assert part.addressable_shards[1].data.shape[:2] == (2, 2), "two layers, two of four experts"
            np.testing.assert_array_equal(np.asarray(part, np.float32), np.asarray(whole, np.float32))


def test_rounded_while_loading(stored, spread, tmp_path):
    """A checkpoint in bf16 gives each device the codes of its own experts."""
    moe_jax.save_pretrained(from_pretrained(stored), tmp_path / "whole")
    rounded = from_pretrained(tmp_path / "whole", weights="fp8", mesh=make_mesh(expert=4))
    for codes in codes_of(rounded):
        assert {part.addressable_shards[0].data.shape[1] for part in (codes.codes, codes.scales)} == {1}
    for ours, expected in zip(codes_of(rounded), codes_of(spread), strict=True):
        np.testing.assert_allclose(ours[...].astype(np.float32), expected[...].astype(np.float32), rtol=0.07, atol=1e-6)


def test_whole_parts_are_cut_anywhere_in_their_blocks(tmp_path, monkeypatch):
    """The parts equal parts of a whole load. Every byte is read once, though two devices hold it."""
    write_fp8(tmp_path, moe_intermediate_size=96, num_hidden_layers=1)
    read, copy = [], streaming._copy
    monkeypatch.setattr(
        streaming, "_copy", lambda stored, source, target: read.append(target.nbytes) or copy(stored, source, target)
    )
    parts = from_pretrained(tmp_path, dtype="float32", mesh=make_mesh(data=2, fsdp=4, expert=1, context=1))
    arrays = [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(parts, nnx.Param))]
    assert sum(read) == sum(sum({str(s.index): s.data.nbytes for s in a.addressable_shards}.values()) for a in arrays)
    assert parts.stages[0].self_attn.q_proj.weight.addressable_shards[0].data.shape[-2] % 128
    assert same_bits(parameters(parts), parameters(from_pretrained(tmp_path, dtype="float32")))


def test_deepseek_v3_fits_eight_gpus():
    """Experts' codes and scales, split, and all else whole in bf16, take 117 of a GPU's 150 GB."""
    config, mesh, total = NAMED_CONFIGS["deepseek-v3"].without_mtp(), make_mesh(fsdp=1, expert=8), 0
    abstract = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        shape, itemsize = leaf.shape, 2
        if path[-2] == "experts" and path[-1] in EXPERT_MATRICES:
            shape, itemsize = parameter_sharding(path, shape, mesh).shard_shape(shape), 1 + 4 / 128**2
        total += itemsize * int(np.prod(shape))
    assert 115e9 < total < 120e9


@pytest.mark.parametrize("in_stack", [False, True], ids=["one layer", "in a stack"])
def test_layer(in_stack):
    """Frozen codes on each device, of one layer or of a stack, equal all experts on one device to a rounding of y."""
    rng = seeds.rng()
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, weights, ids = draw(24, 128), draw(24, 2), jnp.asarray(rng.integers(-1, 8, (24, 2)), jnp.int32)
    matrices = [quantise_matrices(draw(2, 8, *sizes) * 0.1) for sizes in ((256, 128), (128, 128))]
    of_layer = [jax.tree.map(lambda a: a[1], each) for each in matrices]
    expected = experts_mlp(x, *of_layer, weights, ids, precision=Precision())
    given, options = (matrices, dict(layer=jnp.int32(1))) if in_stack else (of_layer, {})

    @jax.jit
    def on_four(x, given, weights, ids):
        def on_one(x, given, weights, ids):
            return expert_parallel_mlp(x, *given, weights, ids, ExpertParallel(), precision=Precision(), **options)[0]

        rows, experts = PartitionSpec("expert"), PartitionSpec(None, "expert") if in_stack else PartitionSpec("expert")
        specs = rows, experts, rows, rows
        return jax.shard_map(on_one, mesh=make_mesh(expert=4), in_specs=specs, out_specs=rows)(x, given, weights, ids)

    found = on_four(x, given, weights, ids)
    assert relative_error(found, expected) < 5e-3
    if not in_stack:
        dy = draw(24, 128)
        on_one = lambda x, given, weights, ids: experts_mlp(x, *given, weights, ids, precision=Precision())  # noqa: E731
        pullbacks = (jax.vjp(lambda x, w, f=f: f(x, given, w, ids), x, weights)[1] for f in (on_four, on_one))
        for ours, wanted in zip(*(pullback(dy) for pullback in pullbacks), strict=True):
            assert relative_error(ours, wanted) < 1e-2


def test_refused():
    """Codes without a precision, and codes mixed with an array."""
    matrices = [quantise_matrices(jnp.ones((4, *sizes), jnp.bfloat16)) for sizes in ((256, 128), (128, 128))]
    arguments = jnp.ones((4, 128), jnp.bfloat16), *matrices, jnp.ones((4, 1), jnp.bfloat16), jnp.zeros((4, 1), jnp.int32)
    on_one = jax.shard_map(
        lambda *a: expert_parallel_mlp(*a, ExpertParallel())[0],
        mesh=make_mesh(expert=2),
        in_specs=PartitionSpec("expert"),
        out_specs=PartitionSpec("expert"),
    )
    with pytest.raises(ValueError, match=r"QuantisedMatrices need precision=Precision\(\).*; got precision=None"):
        jax.eval_shape(on_one, *arguments)
    x, codes, *others = arguments
    with pytest.raises(ValueError, match="must both be arrays or both be QuantisedMatrices; got one of each"):
        jax.eval_shape(on_one, x, codes, jnp.ones((4, 128, 128), jnp.bfloat16), *others[1:])


def largest(model, tokens):
    """Returns the token of the largest logit after each token."""
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).logits)(state, tokens))[0].argmax(axis=1)


@pytest.mark.thorough
def test_generation_and_the_engine(model, spread):
    """Most greedy tokens have the largest logit of a whole pass on one device; FP8 and sums over devices round others."""
    prompts = [seeds.rng().integers(0, 61, length).tolist() for length in (7, 5)]
    options = SamplingOptions(max_new_tokens=9, ignore_eos=True)
    engine = Engine(spread, limits=LIMITS, lazy=True)
    of_engine = [one.tokens for (one,) in engine.generate(prompts, options)]
    engine.close()
    generated = moe_jax.generate(spread, prompts, max_new_tokens=9)
    for tokens_of in (of_engine, generated):
        for prompt, tokens in zip(prompts, tokens_of, strict=True):
            expected = largest(model, np.array([prompt + tokens[:-1]]))[len(prompt) - 1 :]
            assert (expected == tokens).sum() >= 5, (expected, tokens)


@pytest.mark.thorough
def test_as_stored_without_precision(stored):
    """Codes are made whole where a layer is computed: the tokens of the dequantised model, whichever device has the experts."""
    prompts = [[3, 4, 5], [7, 8]]
    expected = moe_jax.generate(from_pretrained(stored, dtype="float32"), prompts, max_new_tokens=6)
    spread = from_pretrained(stored, dtype="float32", weights="as stored", mesh=make_mesh(fsdp=4))
    assert is_quantised(spread.stages[0].self_attn.q_proj.weight.get_value())
    assert moe_jax.generate(spread, prompts, max_new_tokens=6) == expected
    engine = Engine(spread, limits=LIMITS, lazy=True)
    found = engine.generate(prompts, SamplingOptions(max_new_tokens=6, ignore_eos=True))
    engine.close()
    assert [one.tokens for (one,) in found] == expected


@pytest.mark.thorough
def test_nf4(tmp_path):
    """Codes of 4 bits are split in the same way."""
    write_checkpoint(tmp_path, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=2)
    options = dict(weights="nf4", dtype="float32")
    spread = from_pretrained(tmp_path, mesh=make_mesh(fsdp=4), **options)
    assert spread.stages[0].mlp.experts.down_proj.get_value().codes.addressable_shards[0].data.shape[:2] == (2, 1)
    prompts = [[3, 4, 5], [7, 8]]
    expected = moe_jax.generate(from_pretrained(tmp_path, **options), prompts, max_new_tokens=6)
    assert moe_jax.generate(spread, prompts, max_new_tokens=6) == expected


@pytest.mark.thorough
def test_command(stored, capsys):
    tiny.tokenizer().save_pretrained(stored)
    main(["generate", str(stored), "--prompt", "a", "--max-new-tokens", "3", "--precision", "fp8", "--devices", "2"])
    assert capsys.readouterr().out.startswith("a")
