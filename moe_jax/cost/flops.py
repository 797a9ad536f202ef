"""Parameters of a config and floating-point operations (FLOPs) of a token, counted on the abstract model (no arrays)."""

import math
from collections import Counter
from functools import cache

from moe_jax.config import ModelConfig
from moe_jax.cost.parameters import shapes
from moe_jax.layers.matrices import Role, declaration_of


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of trained parameters; shared parameters count once.

    Qwen3-30B-A3B: 30.5e9. DeepSeek-V3: 671.0e9, and 11.6e9 in its multi-token prediction (MTP) module.
    """
    return sum(math.prod(shape) for _, shape in shapes(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters that a token uses, including the embedding table, excluding MTP modules.

    Qwen3-30B-A3B: 3.35e9, DeepSeek-V3: 37.6e9.
    """
    config = config.without_mtp()
    return num_parameters(config) - _idle_weights(config, range(len(config.stages)))


def forward_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Returns the FLOPs of one token in a forward pass: 2 per matmul weight, and the FLOPs of attention.

    Attention costs 2 * heads * (key_dim + value_dim) per key. A token of a causal sequence attends to seq_len / 2 keys on
    average; a sliding window limits them. By convention, norms, softmax and other elementwise work do not count. MTP modules do
    not count either.
    """
    attended = (min(seq_len / 2, window or seq_len) for window in config.layer_windows)
    mixing = sum(mixer.flops(keys) for mixer, keys in zip(config.layer_mixers, attended, strict=True))
    return 2 * _matmul_weights(config, mtp=False) + mixing


def training_flops_per_token(config: ModelConfig, seq_len: float, *, frozen: bool = False) -> float:
    """Returns the FLOPs of one token in a training step: three times the forward pass.

    The backward pass computes two gradients per matmul. Recomputation does not count. MTP modules count, each including the
    vocabulary projection. Qwen3-30B-A3B at seq_len 4096: 23.1e9.

    Args:
      frozen: the weights get no gradients, which leaves one gradient per matmul with a weight. Adapters do not count.
    """
    of_modules = _matmul_weights(config, mtp=True)
    scores = config.mixer.flops(len(config.mtp_stages) * seq_len / 2)
    trained = 3 * (forward_flops_per_token(config, seq_len) + 2 * of_modules + scores)
    return trained - 2 * (_matmul_weights(config, mtp=False) + of_modules) if frozen else trained


@cache
def stage_weights(config: ModelConfig, number: int) -> Counter[Role]:
    """Returns the number of matrix elements in all layers of a stage, by role. MTP modules are the last stages."""
    weights: Counter[Role] = Counter()
    for path, shape in shapes(config):
        if path[:2] == ("stages", number) and (matrix := declaration_of(path, shape)).axes > 1:
            weights[matrix.role] += math.prod(shape)
    return weights


def _matmul_weights(config: ModelConfig, *, mtp: bool) -> int:
    """Returns the weights that multiply one token: in layers and vocabulary projection, or in all MTP modules."""
    layers, modules = len(config.stages), len(config.mtp_stages)
    stages, heads = (range(layers, layers + modules), modules) if mtp else (range(layers), 1)
    multiplied = sum(stage_weights(config, number).total() for number in stages) - _idle_weights(config, stages)
    return multiplied + heads * config.vocab_size * config.hidden_size


def _idle_weights(config: ModelConfig, stages: range) -> int:
    """Returns the weights of experts that one token does not choose."""
    experts, spec = sum(stage_weights(config, number)["experts"] for number in stages), config.experts
    return experts - experts * spec.num_experts_per_tok // spec.num_experts if spec else 0
