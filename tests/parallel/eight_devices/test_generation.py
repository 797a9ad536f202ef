"""A model on several devices generates the tokens of one device, on any mesh of its parameters."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.cli import main
from moe_jax.config import RopeParameters
from moe_jax.generation import generate_with_drafts
from moe_jax.parallel import make_mesh
from tests.helpers import tiny
from tests.helpers.adapted_models import randomise
from tests.helpers.meshes import laid_out

PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11], [3] * 20, [9, 9]]


@pytest.mark.parametrize(
    "make, sizes, options",
    [
        # Two of six devices hold half of the experts each.
        (tiny.model, dict(data=2, fsdp=3), dict(temperature=1.0, top_k=20, seed=3)),
        # The axes of this mesh divide the devices in another way than generation's mesh.
        pytest.param(tiny.model, dict(data=4, expert=2), {}, marks=pytest.mark.thorough),
        pytest.param(tiny.deepseek, dict(fsdp=2, context=4), {}, marks=pytest.mark.thorough),
        pytest.param(tiny.dense, dict(fsdp=2), dict(temperature=1.0, top_p=0.9), marks=pytest.mark.thorough),
    ],
    ids=["six devices", "crossing", "deepseek", "dense"],
)
def test_equals_one_device(make, sizes, options):
    # A third of the tokens end a sequence: some devices finish all their sequences before others.
    model, options = make(), dict(max_new_tokens=9, eos_token_id=range(0, 264, 3), **options)
    expected = moe_jax.generate(model, PROMPTS, **options)
    assert len({*map(len, expected)}) > 1
    assert moe_jax.generate(laid_out(model, **sizes), PROMPTS, **options) == expected


@pytest.mark.thorough
def test_adapted_experts_are_spread_like_others():
    model = tiny.model()
    add_lora(model, LoraSettings(rank=2), rngs=nnx.Rngs(0))
    randomise(model)
    expected = moe_jax.generate(model, PROMPTS, max_new_tokens=4)
    assert moe_jax.generate(laid_out(model, fsdp=3, data=2), PROMPTS, max_new_tokens=4) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", [1, "lookup:2"])
def test_drafts(drafts):
    model = tiny.deepseek(mtp=1)
    options = dict(max_new_tokens=9, temperature=0.5, seed=4, drafts=drafts)
    assert generate_with_drafts(laid_out(model, expert=4), PROMPTS, **options) == generate_with_drafts(
        model, PROMPTS, **options
    )


@pytest.mark.thorough
@pytest.mark.parametrize("make", [tiny.model, tiny.deepseek])
def test_tokens_after_an_overlapping_prefill(make):
    """Four devices have two prompts each; one is padding."""
    model, prompts = laid_out(make(), expert=4), [*PROMPTS, [4, 4, 4], [6, 5]]
    expected = moe_jax.generate(model, prompts, max_new_tokens=5)
    assert moe_jax.generate(model, prompts, max_new_tokens=5, overlap_prefill=True) == expected


def test_refused_overlap():
    model = tiny.model()
    config = replace(model.config, rope_parameters=RopeParameters(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    dynamic = type(model)(config, rngs=nnx.Rngs(0))
    for refused, prompts, reason in (
        (model, PROMPTS[:4], "no device has experts of its own"),
        (model, PROMPTS[:4], "lay the model out on several"),
        (laid_out(tiny.dense(), fsdp=2), PROMPTS[:4], "the model has none"),
        (laid_out(model, fsdp=3), PROMPTS[:4], "the model has 4, and a number of devices with a common divisor"),
        (laid_out(model, expert=4), PROMPTS[:3], "an even number of prompts; 3 on 4 devices are 1 on each"),
        (laid_out(dynamic, expert=2), PROMPTS[:4], "rope_type 'dynamic' reads the longest"),
    ):
        with pytest.raises(ValueError, match=f"overlap_prefill=True: .*{reason}"):
            moe_jax.generate(refused, prompts, overlap_prefill=True)


@pytest.mark.thorough
def test_model_on_one_device():
    model = tiny.model()
    graph, state = nnx.split(model)
    elsewhere = nnx.merge(graph, jax.device_put(state, jax.devices()[5]))
    expected = moe_jax.generate(model, PROMPTS, max_new_tokens=3)
    with jax.set_mesh(make_mesh(fsdp=8)):
        assert moe_jax.generate(elsewhere, PROMPTS, max_new_tokens=3) == expected
    on_no_device = nnx.merge(graph, jax.device_get(state))
    assert moe_jax.generate(on_no_device, PROMPTS, max_new_tokens=3) == expected


@pytest.fixture
def command(tmp_path):
    """The arguments of `moe-jax generate` for a small model."""
    moe_jax.save_pretrained(tiny.model(), tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return ["generate", str(tmp_path / "model"), "--prompt", "text", "--max-new-tokens", "4", "--dtype", "float32"]


@pytest.mark.thorough
def test_command_splits_experts(command, capsys):
    main(command)
    expected = capsys.readouterr().out
    main([*command, "--devices", "4"])
    assert capsys.readouterr().out == expected


def test_command_refuses_devices(command, capsys):
    for devices, message in (
        ("3", "model has 4 experts, and there are 3 devices"),
        ("9", "must be 1 to 8"),
        ("0", "at least 1; got 0"),
    ):
        with pytest.raises(SystemExit):
            main([*command, "--devices", devices])
        assert message in capsys.readouterr().err
