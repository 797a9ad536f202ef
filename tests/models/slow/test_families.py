"""Families that differ by switches compute what transformers' models compute, and come back from files; a row adds a family."""

import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.adapters import load_adapter, save_adapter
from moe_jax.adapters.names import OUTSIDE, targets_of
from moe_jax.checkpoint.hf_names import export
from moe_jax.models.auto import abstract_parameters
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers.adapted_models import logits_of, with_adapters
from tests.helpers.families import FAMILIES, build, saved, saved_gradients

WITH_GRADIENTS = ("gpt_oss", "axk1")
"""Families whose functions have gradients of their own: sinks, biases of experts, latents. JAX differentiates the others."""
NOT_OF_PEFT = ("qwen2_moe", "hy_v3", "axk1")
"""Families for which PEFT 0.21 does not join the factors of each expert, which we write."""
COMBINED = ("dots1", "solar_open", "glm4_moe_lite", "mixtral", "minimax_m2", "hy_v3")
"""Families whose switches are all other families' too."""


def only(*names):
    """Further families are thorough."""
    params = [pytest.param(name, marks=[pytest.mark.thorough] * (name not in names)) for name in FAMILIES]
    return pytest.mark.parametrize("theirs", params, indirect=True)


@pytest.fixture
def theirs(request, rng):
    return build(request.param, rng)


@pytest.fixture
def ours(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    return load(tmp_path / "theirs")


def load(folder):
    return moe_jax.from_pretrained(folder, dtype=jnp.float32, progress=False)


def logits_of_theirs(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("theirs", sorted(FAMILIES.keys() - {*COMBINED, *WITH_GRADIENTS}), indirect=True)
def test_logits_equal_those_of_transformers(theirs, ours, rng):
    tokens = rng.integers(3, 96, size=(2, 23))
    assert error(logits_of(ours, jnp.asarray(tokens)), logits_of_theirs(theirs, tokens)) < 1e-5


@only(*WITH_GRADIENTS)
def test_logits_and_gradients_equal_those_of_transformers(theirs, ours, rng):
    tokens = rng.integers(3, 96, size=(2, 23))
    direction = rng.normal(size=(2, 23, 96)).astype(np.float32)
    graph, params, biases = nnx.split(ours, nnx.Param, ...)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def value_and_gradients(params):
        logits = nnx.merge(graph, params, biases)(jnp.asarray(tokens)).logits
        return jnp.sum(logits * direction), logits

    (_, logits), gradients = value_and_gradients(params)
    expected = theirs(torch.tensor(tokens)).logits
    (expected * torch.tensor(direction)).sum().backward()
    assert error(logits, expected.detach().numpy()) < 1e-5
    flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(gradients)}
    found, wanted = dict(export(ours.config, flat)), saved_gradients(theirs)
    assert found.keys() == wanted.keys()
    # An expert with few tokens has gradients as small as the rounding errors of the layer's others.
    errors = {}
    for kind, names in groupby(sorted(wanted, key=kind_of), key=kind_of):
        arrays = [(found[name], wanted[name]) for name in names]
        errors[kind] = error(*map(np.stack, zip(*arrays, strict=True)))
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]


@only(*FAMILIES)
def test_files_equal_those_of_transformers(theirs, ours, rng, tmp_path):
    """Names, bytes, and a config.json with which transformers computes the same."""
    moe_jax.save_pretrained(ours, tmp_path / "ours", progress=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    tensors, wanted = saved(again), saved(theirs)
    assert tensors.keys() == wanted.keys() and moe_jax.load_config(tmp_path / "ours") == ours.config
    for name, array in wanted.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
    tokens = rng.integers(3, 96, size=(1, 9))
    assert error(logits_of_theirs(again, tokens), logits_of_theirs(theirs, tokens)) < 1e-6


@pytest.mark.filterwarnings("ignore")  # PEFT names ranks that it found by another name
@only("mixtral")
def test_an_adapter_comes_back_and_peft_reads_it(theirs, ours, rng, tmp_path):
    peft = pytest.importorskip("peft")
    base = nnx.clone(ours)
    is_read = theirs.config.model_type not in NOT_OF_PEFT
    # PEFT refuses most families' routers, or reads them at the experts' rank.
    kinds = {target.kind for target in targets_of(ours)} - ({"router", *OUTSIDE} if is_read else set(OUTSIDE))
    save_adapter(with_adapters(ours, targets=tuple(kinds)), tmp_path / "adapter")
    load_adapter(base, tmp_path / "adapter")
    tokens = rng.integers(3, 96, size=(2, 9))
    logits = logits_of(ours, jnp.asarray(tokens))
    assert error(logits_of(base, jnp.asarray(tokens)), logits) < 3e-6
    if not is_read:
        return
    model = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    assert error(logits_of_theirs(model, tokens), logits) < 1e-5


@pytest.mark.filterwarnings("ignore")
@only("ernie4_5_moe")
def test_the_files_of_peft_are_read(theirs, ours, rng, tmp_path):
    peft = pytest.importorskip("peft")
    latent = hasattr(theirs.config, "kv_lora_rank")
    config = peft.LoraConfig(
        r=4, lora_alpha=6.0, task_type="CAUSAL_LM", target_modules=["o_proj", "kv_b_proj" if latent else "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    model = peft.get_peft_model(theirs, config).eval()
    for name, factor in model.named_parameters():
        if "lora_" in name:
            factor.data = torch.tensor(0.1 * rng.normal(size=factor.shape), dtype=torch.float32)
    model.save_pretrained(tmp_path / "adapter")
    load_adapter(ours, tmp_path / "adapter")
    tokens = rng.integers(3, 96, size=(2, 9))
    assert error(logits_of(ours, jnp.asarray(tokens)), logits_of_theirs(model, tokens)) < 1e-5


@only("gpt_oss")
def test_cached_tokens_are_those_of_one_pass(theirs, ours, rng):
    prompt = rng.integers(3, 96, size=(1, 9))
    new = np.array(moe_jax.generate(ours, jnp.asarray(prompt), max_new_tokens=4, temperature=0.0))
    logits = logits_of_theirs(theirs, np.concatenate([prompt, new], axis=1))
    np.testing.assert_array_equal(new, logits[:, 8:-1].argmax(axis=-1))


@only("gpt_oss")
def test_an_engine_runs_the_modules(theirs, ours, rng):
    prompts = [rng.integers(3, 96, size=length).tolist() for length in (9, 4)]
    limits = EngineLimits(max_length=32, max_sequences=2, max_tokens_per_step=16)
    with closing(Engine(ours, limits=limits, lazy=True)) as engine:
        completions = engine.generate(prompts, SamplingOptions(max_new_tokens=3, ignore_eos=True))
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        logits = logits_of_theirs(theirs, np.array([prompt + completion.tokens]))
        np.testing.assert_array_equal(completion.tokens, logits[0, len(prompt) - 1 : -1].argmax(axis=-1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "theirs, of, switch, value",
    [
        ("mixtral", "mixer", "head_norms", True),
        ("qwen2_moe", "mixer", "output_bias", True),
        ("olmoe", "mixer", "joint_norms", False),
        ("olmoe", "mixer", "clip", None),
        ("hunyuan_v1_moe", "mixer", "norms_after_rope", False),
        ("ernie4_5_moe", "mixer", "interleaved", False),
        ("glm4_moe", "mixer", "rotary_dim", 32),
        ("qwen2_moe", "experts", "shared_gate", False),
        ("axk1", "experts", "output_norm", False),
        ("solar_open", "experts", "shared_intermediate_size", 0),
        ("olmoe", "rule", "norm_topk_prob", True),
        ("hy_v3", "rule", "scoring_func", "softmax"),
        ("hy_v3", "rule", "routed_scaling_factor", 1.0),
        ("minimax_m2", "rule", "choice_bias", False),
        ("axk1", "rule", "num_groups", 1),
        ("mixtral", None, "layer_windows", (None,) * 3),
        ("gpt_oss", None, "layer_windows", (5,) * 3),
        ("gpt_oss", "mixer", "sinks", False),
        ("gpt_oss", "rule", "linear_bias", False),
        ("gpt_oss", "experts", "biases", False),
        ("gpt_oss", "experts", "activation", (1.702, 7.0, 1.0)),
    ],
    indirect=["theirs"],
)
def test_a_forgotten_switch_is_seen(theirs, of, switch, value, ours, rng, tmp_path, monkeypatch):
    """The tiny models show each switch: set to another family's value, logits differ or the checkpoint does not fit."""
    tokens = rng.integers(3, 96, size=(2, 12))
    changed, name = type(ours.config), "experts" if of == "rule" else of
    if of is None:
        monkeypatch.setattr(changed, switch, value)
    else:
        right = getattr(changed, name)

        def wrong(config):
            spec = right.fget(config)
            return (
                replace(spec, rule=replace(spec.rule, **{switch: value})) if of == "rule" else replace(spec, **{switch: value})
            )

        monkeypatch.setattr(changed, name, property(wrong))
    abstract_parameters.cache_clear()
    try:
        model = load(tmp_path / "theirs")
    except ValueError as error_of_tensors:
        assert "the checkpoint in" in str(error_of_tensors)
    else:
        assert np.abs(logits_of(model, jnp.asarray(tokens)) - logits_of_theirs(theirs, tokens)).max() > 1e-2
    finally:
        abstract_parameters.cache_clear()


def kind_of(name):
    """A tensor's name without the number of its expert."""
    return re.sub(r"experts\.\d+\.", "experts.", name)


def error(found, wanted):
    """The largest difference, as a part of the largest number."""
    return np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max()
