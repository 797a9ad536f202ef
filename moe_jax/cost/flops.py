"""Parameters of a config and floating-point operations (FLOPs) of a token, counted on the model itself without its arrays."""

import math
from collections import Counter
from functools import cache

from moe_jax.config import ModelConfig
from moe_jax.cost.parameters import shapes
from moe_jax.parallel.matrices import Role, declaration_of


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of trained parameters; shared parameters count once.

    Qwen3-30B-A3B: 30.5e9. DeepSeek-V3: 671.0e9, and 11.6e9 in its multi-token prediction (MTP) module.
    """
    return sum(math.prod(shape) for _, shape in shapes(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters that a token passes through, with the embedding table, without MTP modules.

    Qwen3-30B-A3B: 3.35e9, DeepSeek-V3: 37.6e9.
    """
    config = config.without_mtp()
    experts = sum(stage.num_layers * layer_weights(config, n)["experts"] for n, stage in enumerate(config.stages))
    return num_parameters(config) - experts + _active(config, experts)


def forward_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Returns the FLOPs of one token in a forward pass: 2 per matmul weight, and the FLOPs of attention.

    Attention takes 2 * heads * (key_dim + value_dim) per key. A token of a causal sequence attends to seq_len / 2 keys on
    average; a sliding window limits them. Norms, softmax and other elementwise work do not count, by custom. MTP modules do not
    count either.
    """
    attended = sum(min(seq_len / 2, window or seq_len) for window in config.layer_windows)
    return 2 * _matmul_weights(config, mtp=False) + config.mixer.flops(attended)


def training_flops_per_token(config: ModelConfig, seq_len: float, *, frozen: bool = False) -> float:
    """Returns the FLOPs of one token in a training step: three times the forward pass.

    The backward pass computes two gradients per matmul. Recomputation does not count. MTP modules count, each with the
    vocabulary projection. Qwen3-30B-A3B at seq_len 4096: 23.1e9.

    Args:
      frozen: the weights get no gradients, which leaves one gradient per matmul with a weight. Adapters do not count.
    """
    of_modules = _matmul_weights(config, mtp=True)
    scores = config.mixer.flops(len(config.mtp_stages) * seq_len / 2)
    whole = 3 * (forward_flops_per_token(config, seq_len) + 2 * of_modules + scores)
    return whole - 2 * (_matmul_weights(config, mtp=False) + of_modules) if frozen else whole


@cache
def layer_weights(config: ModelConfig, number: int) -> Counter[Role]:
    """Returns the weights of one layer's matrices by role. MTP modules are stages after the others."""
    weights: Counter[Role] = Counter()
    for path, shape in shapes(config):
        if path[:2] == ("stages", number) and (matrix := declaration_of(path, shape)).axes > 1:
            weights[matrix.role] += math.prod(shape[1:])
    return weights


def _matmul_weights(config: ModelConfig, *, mtp: bool) -> int:
    """Returns the weights that multiply one token: of the layers and the vocabulary projection, or of all MTP modules."""
    stages = [*enumerate((*config.stages, *config.mtp_stages))]
    weights, own = 0, stages[len(config.stages) :] if mtp else stages[: len(config.stages)]
    for number, stage in own:
        of_layer = layer_weights(config, number)
        weights += stage.num_layers * (of_layer.total() - of_layer["experts"] + _active(config, of_layer["experts"]))
    return weights + (len(own) if mtp else 1) * config.vocab_size * config.hidden_size


def _active(config: ModelConfig, experts: int) -> int:
    """Returns the part of the experts' weights that multiplies one token."""
    spec = config.experts
    return experts * spec.num_experts_per_tok // spec.num_experts if spec else 0
