"""Small checkpoints that transformers writes, with fresh random weights, and tools to take folders apart."""

import json
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file

from moe_jax.checkpoint.hf_load import from_pretrained
from tests.helpers import seeds

SIZES = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
MOE_SIZES = dict(SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
DEEPSEEK_SIZES = dict(
    {name: size for name, size in SIZES.items() if name != "head_dim"},
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=7,
    moe_intermediate_size=8,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
)


def write_checkpoint(
    folder: Path, *, moe: bool = True, deepseek: bool = False, dtype=torch.float32, shard: str = "20KB", **overrides
):
    """A transformers checkpoint with every weight random; returns the transformers model."""
    torch.manual_seed(seeds.integer())
    if deepseek:
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**DEEPSEEK_SIZES, **overrides}))
    elif moe:
        config = transformers.Qwen3MoeConfig(**{**MOE_SIZES, **overrides})
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**{**SIZES, **overrides})
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model = model.to(dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Loading keeps it in f32 in a model of any dtype.
            model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = torch.randn(buffer.shape)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def rewrite_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Puts `weights` in place of a folder's weight files, in one file without an index."""
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def fuse_experts(weights: dict[str, torch.Tensor], layer: int, num_experts: int) -> dict[str, torch.Tensor]:
    """Returns the same weights with the experts of one layer as two tensors, as transformers 5 holds them in memory."""
    weights = dict(weights)
    prefix = f"model.layers.{layer}.mlp.experts."

    def take(name: str) -> list[torch.Tensor]:
        return [weights.pop(f"{prefix}{e}.{name}.weight") for e in range(num_experts)]

    gate, up, down = take("gate_proj"), take("up_proj"), take("down_proj")
    weights[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
    weights[prefix + "down_proj"] = torch.stack(down)
    return weights


def parameters(model) -> dict[tuple, np.ndarray]:
    """Returns a model's parameters by path, on the host, and its other state."""
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def same_bits(a: dict, b: dict) -> bool:
    """Returns True if two dicts of arrays or tensors have equal keys, dtypes, shapes and bytes."""

    def raw(x):
        return (str(x.dtype), tuple(x.shape), (x.contiguous().view(torch.uint8).numpy() if torch.is_tensor(x) else x).tobytes())

    return a.keys() == b.keys() and all(raw(a[name]) == raw(b[name]) for name in a)


def edit_config(folder: Path, **fields) -> None:
    """Changes fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


QUANTIZATION = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=[128, 128],
    modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
)


def quantise(weight: torch.Tensor, block=(128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and the scales of its blocks: DeepSeek's way, the largest number of a block becomes 448."""
    rows, columns = weight.shape[-2:]
    height, width = block
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    scales = tiles.abs().amax(dim=(-3, -1)).clamp(min=1e-12) / 448
    quantised = (tiles / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    whole = quantised.float().flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    return whole.to(torch.float8_e4m3fn).contiguous(), scales


def write_fp8(folder, *, fused_layers=(), scale_dtype=torch.float32, **overrides) -> None:
    """A Qwen3-MoE checkpoint with the projections in FP8, under the names of Qwen/Qwen3-30B-A3B-FP8."""
    sizes = dict(hidden_size=256, intermediate_size=384, moe_intermediate_size=128, head_dim=64, num_hidden_layers=2)
    write_checkpoint(folder, dtype=torch.bfloat16, **{**sizes, **overrides})
    weights = read_weights(folder)
    for layer in fused_layers:
        weights = fuse_experts(weights, layer, num_experts=4)
    stored = {}
    for name, tensor in weights.items():
        if "_proj" in name:
            tensor, scales = quantise(tensor)
            stored[f"{name}_scale_inv"] = scales.to(scale_dtype)
        stored[name] = tensor
    rewrite_weights(folder, stored)
    edit_config(folder, quantization_config=QUANTIZATION)


def multiplying_in_fp8(folder, **options):
    """Returns the model of a folder with its experts in FP8, multiplied so; options as for `from_pretrained`."""
    model = from_pretrained(folder, weights="fp8", **options)
    model.set_precision("fp8")
    return model


def of_transformers(folder, dtype, monkeypatch) -> dict[str, torch.Tensor]:
    """Returns the weights that transformers loads."""
    # transformers asks for a package that it does not use on a CPU.
    monkeypatch.setattr(transformers.quantizers.quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.state_dict()


def assert_same(array: np.ndarray, tensor: torch.Tensor):
    np.testing.assert_array_equal(array.astype(np.float32).view(np.int32), tensor.float().view(torch.int32))
