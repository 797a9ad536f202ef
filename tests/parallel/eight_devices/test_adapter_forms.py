"""Adapters on meshes with each form of frozen weights: a step's loss, metrics and gradients equal one device's."""

from dataclasses import replace
from functools import cache

import pytest

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.parallel import Parallelism
from moe_jax.parallel.pipeline.chunks import from_chunks
from tests.helpers import tiny
from tests.helpers.meshes import mesh_of
from tests.parallel.eight_devices.test_adapters import check, collectives, two_steps, with_adapters

FORMS = {"bf16": "whole", "nf4": "nf4", "fp8": "fp8"}
"""{frozen weights: `weights` of `from_pretrained`}."""
MESHES = (
    {"fsdp": 2, "context": 2},
    *({"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "expert": 2, "context": 2}, {"fsdp": 8}),
    *({"pipe": 2, "fsdp": 2, "expert": 2}, {"pipe": 2, "data": 2, "context": 2}),
)
TABLE = [(form, sizes) for form in FORMS for sizes in MESHES if form == "bf16" or "pipe" not in sizes]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    moe_jax.save_pretrained(tiny.model_for_fp8(), folder)
    return folder


@cache
def on_one_device(base, form, gradient_accumulation):
    return two_steps(model_of(base, form, None), steps=1, gradient_accumulation=gradient_accumulation)


def model_of(base, form, mesh):
    options = dict(dtype="float32", param_dtype="bfloat16" if form == "bf16" else "float32", weights=FORMS[form])
    return with_adapters(moe_jax.from_pretrained(base, **options, mesh=mesh), LoraSettings(rank=4))


@pytest.mark.parametrize(
    "form, sizes",
    [pytest.param(*row, marks=() if row == ("nf4", MESHES[0]) else pytest.mark.thorough) for row in TABLE],
    ids=str,
)
def test_a_step(form, sizes, base):
    mesh = mesh_of(**sizes)
    micro_batches = 2 if "pipe" in sizes else 1
    model = model_of(base, form, mesh)
    state, metrics = two_steps(model, Parallelism(mesh), steps=1, gradient_accumulation=micro_batches)
    if "pipe" in sizes:
        layers = model.config.num_hidden_layers
        state = replace(state, params=from_chunks(state.params, layers), opt_state=from_chunks(state.opt_state, layers))
    check((state, metrics), on_one_device(base, form, micro_batches), tolerance=3e-5)


@pytest.mark.thorough
def test_codes_travel(base):
    """Experts are loaded in parts, in 4 bits, and gathered in the bytes that are stored."""
    mesh = mesh_of(fsdp=2, expert=2, data=2)
    model = model_of(base, "nf4", mesh)
    codes = model.stages[0].mlp.experts.down_proj.get_value().codes
    assert codes.addressable_shards[0].data.size == codes.size / 4
    assert ("all_gather", f"{codes.shape[1] // 4}x128x{codes.shape[-1]}xui8") in collectives(model, Parallelism(mesh))
