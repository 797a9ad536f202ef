"""The arrays of a served model: differences that no update can have, and tables with an adapter's rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.kernels import Precision
from moe_jax.layers.lora import Frozen
from moe_jax.layers.quantised import BlockScaled
from moe_jax.serving.weights import ServedModel, Weights, first_difference, with_ready_adapters
from tests.helpers import tiny

SIZES = dict(
    vocab_size=8, hidden_size=4, intermediate_size=4, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8
)
CONFIG = moe_jax.Qwen3Config(**SIZES, num_hidden_layers=1)
PLAIN = {"weight": nnx.Param(jnp.zeros((4, 4)))}
FP8 = {"weight": Frozen(BlockScaled.fp8(jnp.zeros((128, 128)), jnp.float32))}


def adapted(rank):
    return {"weight": Frozen(jnp.zeros((4, 4))), "lora": {"a": nnx.LoRAParam(jnp.zeros((rank, 4)))}}


@pytest.mark.parametrize(
    "changes, o_proj, of_engine, difference",
    [
        ({"config": moe_jax.Qwen3Config(**SIZES, num_hidden_layers=2)}, PLAIN, FP8, "num_hidden_layers is 2; the engine has 1"),
        ({"dtype": "float16"}, PLAIN, FP8, "dtype is float16; the engine has bfloat16"),
        ({"precision": Precision()}, PLAIN, FP8, "precision is Precision(kept='bf16', dense=()); the engine has None"),
        (
            {},
            PLAIN,
            FP8,
            "layers.0.o_proj.weight is Param float32[4, 4]; the engine has Frozen BlockScaled float8_e4m3fn[128, 128] "
            "float32[1, 1]",
        ),
        ({}, PLAIN, adapted(2), "adapter is none; the engine has o_proj.lora"),
        ({}, adapted(2), PLAIN, "adapter is o_proj.lora; the engine has none"),
        (
            {},
            adapted(3),
            adapted(2),
            "layers.0.o_proj.lora.a is LoRAParam float32[3, 4]; the engine has LoRAParam float32[2, 4]",
        ),
        ({}, {}, PLAIN, "layers.0.o_proj.weight is absent; the engine has Param float32[4, 4]"),
        ({"unfused": "its reason"}, PLAIN, PLAIN, "its modules have other settings"),
    ],
)
def test_the_first_difference_is_named(changes, o_proj, of_engine, difference):
    served = ServedModel(CONFIG, "bfloat16", None, ())
    found, wanted = (Weights(nnx.State({}), (nnx.State({"o_proj": each}),), ()) for each in (o_proj, of_engine))
    assert first_difference((served._replace(**changes), found), (served, wanted)) == difference


def test_rows_of_tokens_are_in_the_tables():
    model = tiny.dense()
    add_lora(model, LoraSettings(rank=2, targets=("q_proj",), trainable_token_indices=(5, 264)), rngs=nnx.Rngs(0))
    for table in model.tables.values():
        table.token_rows.rows[...] += 1
    ready = with_ready_adapters(model)
    np.testing.assert_array_equal(ready.lm_head.weight[...], model.head_weight)
    np.testing.assert_array_equal(ready.embed_tokens.weight[...][jnp.array([5, 264])], model.embed_tokens.token_rows.rows[...])
    assert all(table.token_rows is None for table in ready.tables.values()) and model.lm_head.token_rows is not None
