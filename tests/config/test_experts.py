"""Every config describes its attention and its experts, and code that serves all architectures reads it there alone."""

import ast
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

from moe_jax.config import (
    EXPERT_LAYERS,
    NAMED_CONFIGS,
    DeepseekV2Config,
    DeepseekV3Config,
    ExpertLayer,
    ExpertsSpec,
    HeadsSpec,
    LatentSpec,
    ModelConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RouterRule,
)
from moe_jax.config.specs import TINY
from moe_jax.cost import PlannedStep
from moe_jax.cost.flops import forward_flops_per_token, num_active_parameters, num_parameters
from moe_jax.cost.layer import layer_seconds
from moe_jax.cost.memory import memory_bytes
from moe_jax.cost.step import predict
from moe_jax.generation.devices import generation_mesh
from moe_jax.models.auto import MODEL_CLASSES, Qwen3
from moe_jax.models.inputs import check_shapes
from moe_jax.parallel.choices import MeshShape
from moe_jax.train.rebalance import num_groups, rebalance

PACKAGE = Path(__file__).parents[2] / "moe_jax"
QWEN = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=2)


@pytest.mark.parametrize(
    "config, experts",
    [
        (Qwen3Config(), None),
        (Qwen3MoeConfig(num_experts=0), None),
        (Qwen3MoeConfig(num_hidden_layers=1, mlp_only_layers=(0,)), None),
        (DeepseekV3Config(num_hidden_layers=3, num_nextn_predict_layers=0), None),
        (
            Qwen3MoeConfig(router_aux_loss_coef=0.25),
            ExpertsSpec(
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, rule=RouterRule(norm_topk_prob=False),
                aux_loss_coef=0.25,
            ),
        ),
        (
            DeepseekV3Config(n_shared_experts=3, aux_loss_alpha=0.5),
            ExpertsSpec(
                num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, shared_intermediate_size=3 * 2048,
                rule=RouterRule("sigmoid", 8, 4, 2, True, 2.5, added_to_sum=TINY, choice_bias=True), sequence_loss_coef=0.5,
            ),
        ),
        (
            DeepseekV2Config(n_group=4, seq_aux=False, moe_intermediate_size=64),
            ExpertsSpec(
                num_experts=64, num_experts_per_tok=8, moe_intermediate_size=64, shared_intermediate_size=128,
                rule=RouterRule("softmax", 1, 1, 1, False, added_to_sum=TINY),
            ),
        ),
        (
            # The only sparse layer is the module that predicts a further token.
            DeepseekV3Config(num_hidden_layers=3),
            NAMED_CONFIGS["deepseek-v3"].experts,
        ),
    ],
)  # fmt: skip
def test_every_config_says_its_experts(config, experts):
    assert config.experts == experts


def test_a_class_that_does_not_define_experts_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Undefined(ModelConfig):
        pass

    sizes = dict.fromkeys(ModelConfig.positive, 8)
    with pytest.raises(NotImplementedError, match="Undefined must define the property experts"):
        Undefined(**sizes)
    with pytest.raises(NotImplementedError, match="Undefined must define the property mixer"):
        ModelConfig.mixer.fget(object.__new__(Undefined))


def test_sparse_layers_without_experts_are_refused():
    """A new architecture that inherits from a dense one cannot count 0 experts."""

    @dataclass(frozen=True, kw_only=True)
    class Forgetful(Qwen3Config):
        ffn_experts: int = 4

        @property
        def moe_layers(self):
            return (0, 1)

    with pytest.raises(NotImplementedError, match=r"Forgetful.experts is None with sparse layers \(0, 1\)"):
        Forgetful(num_hidden_layers=2)


def test_experts_without_sparse_layers_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Boastful(Qwen3Config):
        @property
        def experts(self):
            return QWEN.experts

    with pytest.raises(NotImplementedError, match="any other None"):
        Boastful(num_hidden_layers=2)


@dataclass(frozen=True, kw_only=True)
class OtherNames(Qwen3Config):
    """A new architecture. Its fields have other names than usual."""

    ffn_experts: int = 6
    ffn_choices: int = 2
    ffn_width: int = 96

    model_type = "other_names"

    @property
    def moe_layers(self):
        return tuple(range(self.num_hidden_layers))

    @property
    def experts(self):
        return ExpertsSpec(
            num_experts=self.ffn_experts,
            num_experts_per_tok=self.ffn_choices,
            moe_intermediate_size=self.ffn_width,
            shared_intermediate_size=32,
            rule=RouterRule(num_groups=3, groups_per_token=3),
            aux_loss_coef=0.125,
            sequence_loss_coef=0.25,
        )


OTHER = OtherNames(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
DENSE = Qwen3Config(
    **{name: getattr(OTHER, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
    num_key_value_heads=2,
    intermediate_size=2 * 96 + 32,
)


def test_flops_see_the_experts_of_a_new_architecture(monkeypatch):
    """A token passes two experts, the shared one and the router, as if they were one dense block and a matrix."""
    monkeypatch.setitem(MODEL_CLASSES, "other_names", Qwen3)
    router = 2 * 64 * 6
    assert num_active_parameters(OTHER) == num_parameters(DENSE) + router
    assert num_parameters(OTHER) == num_parameters(DENSE) + router + 2 * (6 - 2) * 3 * 64 * 96
    assert forward_flops_per_token(OTHER, 8) == forward_flops_per_token(DENSE, 8) + 2 * router


def test_checks_see_the_experts_of_a_new_architecture():
    with pytest.raises(ValueError, match="6 experts cannot be divided among mesh.expert=4 devices"):
        PlannedStep(OTHER, MeshShape(expert=4), 4, 8)
    assert OTHER.experts.num_experts == 6 and DENSE.experts is None
    with pytest.raises(ValueError, match=r"\(2, 1, 3, 2\)"):
        check_shapes(OTHER, np.zeros((1, 3), int), None, None, None, np.zeros((1, 1, 3, 2), int))


def test_rebalancing_sees_the_experts_of_a_new_architecture():
    assert num_groups(OTHER) == 3 and num_groups(DENSE) == 1
    with pytest.raises(ValueError, match=r"\[moe_layers, experts\] = \[2, 6\]"):
        rebalance(None, OTHER, np.ones((2, 5)), 1)


@pytest.mark.parametrize("config, experts", [(OTHER, 2), (DENSE, 1)], ids=["sparse", "dense"])
def test_generation_meshes_see_the_experts_of_a_new_architecture(config, experts, monkeypatch):
    """The axis `expert` takes the greatest common divisor of four devices and 6."""
    monkeypatch.setattr("moe_jax.generation.devices.Mesh", lambda devices, *_, **__: devices)
    assert generation_mesh(range(4), config).shape == (4 // experts, experts)


class Overridden(Qwen3MoeConfig):
    """Qwen3-MoE, with a spec that differs from its fields: what changes with it was read from it."""

    @property
    def experts(self):
        rule = replace(super().experts.rule, num_groups=4)
        return replace(super().experts, num_experts_per_tok=4, shared_intermediate_size=512, rule=rule)


def test_the_cost_model_reads_the_spec():
    overridden = Overridden(**{field.name: getattr(QWEN, field.name) for field in fields(QWEN)})
    step, other = (PlannedStep(config, MeshShape(expert=4), 4, 4096, remat=False) for config in (QWEN, overridden))
    assert other.room == step.room / 2
    first, second = (predict(of) for of in (step, other))
    for part in ("experts", "exchange", "projections"):
        assert first.seconds[part] != second.seconds[part], part
    assert memory_bytes(step)["activations"] > memory_bytes(other)["activations"]
    assert layer_seconds(other, 0, first.machine)["experts"].forward < layer_seconds(step, 0, first.machine)["experts"].forward


def test_no_config_is_asked_for_a_field_that_it_may_lack():
    """A `getattr` with a default counts 0 experts where an architecture has another name for them."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3
        if ast.unparse(node.args[0]).split(".")[-1] == "config"
    ]
    assert not wrong, f"read config.experts instead: {wrong}"


def test_attention_of_heads_keeps_keys_and_values():
    mixer = Qwen3MoeConfig(num_attention_heads=8, num_key_value_heads=2, head_dim=16, attention_bias=True).mixer
    sizes = dict(heads=8, kv_heads=2, key_dim=16, value_dim=16, rotary_dim=16)
    assert mixer == HeadsSpec(**sizes, biases=True, head_norms=True)
    assert (mixer.of_token, mixer.of_sequence, mixer.latent_value_dim) == (((2, 16), (2, 16)), (), None)
    assert (mixer.flops(3), mixer.backward_flops(3)) == (3 * 2 * 8 * 32, 3 * 8 * 160)
    assert mixer.travelling_elements == mixer.key_value_elements == 2 * 32 and mixer.expanded_elements == 0


def test_latent_attention_keeps_latents():
    mixer = DeepseekV3Config().mixer
    assert isinstance(mixer, LatentSpec) and not mixer.biases
    assert (mixer.of_token, mixer.latent_value_dim, mixer.latent_dim) == (((576,),), 512, 576)
    assert mixer.expansion == (128 * (128 + 128), 512) and mixer.expanded_elements == 128 * (192 + 128)
    assert (mixer.query_rank, DeepseekV3Config(q_lora_rank=None).mixer.query_rank) == (1536, 0)


def test_layers_of_experts_are_those_of_the_named_configs():
    sparse = {name for name, config in NAMED_CONFIGS.items() if config.experts}
    assert EXPERT_LAYERS.keys() == sparse
    assert EXPERT_LAYERS["qwen3-30b-a3b"] == ExpertLayer(hidden=2048, inter=768, experts=128, top_k=8)
    assert EXPERT_LAYERS["qwen3-235b-a22b"] == ExpertLayer(hidden=4096, inter=1536, experts=128, top_k=8)
    assert EXPERT_LAYERS["deepseek-v3"] == ExpertLayer(hidden=7168, inter=2048, experts=256, top_k=8)
    assert EXPERT_LAYERS["mixtral-8x7b"] == ExpertLayer(hidden=4096, inter=14336, experts=8, top_k=2)
