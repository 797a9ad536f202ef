"""Adapters on each mesh with each form of frozen weights: a step's loss, metrics and gradients equal one device's."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.parallel import Parallelism, make_mesh
from moe_jax.parallel.pipeline.chunks import from_chunks
from tests.helpers import tiny
from tests.parallel.eight_devices.test_adapters import check, two_steps, with_adapters

FORMS = {"bf16": "whole", "nf4": "nf4", "fp8": "fp8"}
"""{frozen weights: `weights` of `from_pretrained`}."""
MESHES = (
    *({axis: 2} for axis in ("data", "fsdp", "expert", "context")),
    *({"data": 2, "fsdp": 2}, {"fsdp": 2, "expert": 2}, {"fsdp": 2, "context": 2}, {"expert": 2, "context": 2}),
    *({"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "expert": 2, "context": 2}, {"fsdp": 8}),
)
PIPES = (
    *({"pipe": 2}, {"pipe": 2, "fsdp": 2, "expert": 2}),
    *({"pipe": 2, axis: 2} for axis in ("data", "fsdp", "expert", "context")),
)
QUICK = [("nf4", {"fsdp": 2, "context": 2})]
TABLE = [(form, sizes) for form in FORMS for sizes in MESHES] + [("bf16", sizes) for sizes in PIPES]


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
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.thorough) for row in TABLE],
    ids=str,
)
def test_a_step(form, sizes, base):
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    micro_batches = 2 if "pipe" in sizes else 1
    model = model_of(base, form, mesh)
    state, metrics = two_steps(model, Parallelism(mesh), steps=1, gradient_accumulation=micro_batches)
    if "pipe" in sizes:
        layers = model.config.num_hidden_layers
        state = replace(state, params=from_chunks(state.params, layers), opt_state=from_chunks(state.opt_state, layers))
    check((state, metrics), on_one_device(base, form, micro_batches), tolerance=3e-5)
