"""Parameters of a config and floating-point operations (FLOPs) of a token."""

from typing import Any

from moe_jax.config import DeepseekV3Config, ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of trained parameters; shared parameters count once.

    Qwen3-30B-A3B: 30.5e9. DeepSeek-V3: 671.0e9, and 11.6e9 in its multi-token prediction (MTP) module.
    """
    norms = 2 * config.num_hidden_layers * config.hidden_size + config.hidden_size
    vectors = config.num_hidden_layers * _attention_vectors(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    modules = _mtp_matmul_parameters(config, every_expert=True) + len(config.mtp_stages) * (
        5 * config.hidden_size + _attention_vectors(config) - config.vocab_size * config.hidden_size
    )
    return _matmul_parameters(config, every_expert=True) + embedding + norms + vectors + modules


def num_active_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters that a token passes through, with the embedding table, without MTP modules.

    Qwen3-30B-A3B: 3.35e9, DeepSeek-V3: 37.6e9.
    """
    inactive = _matmul_parameters(config, every_expert=True) - _matmul_parameters(config, every_expert=False)
    return num_parameters(config.without_mtp()) - inactive


def forward_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Returns the FLOPs of one token in a forward pass: 2 per matmul weight, and the FLOPs of attention.

    Attention takes 2 * heads * (key_dim + value_dim) per key. A token of a causal sequence attends to seq_len / 2 keys on
    average; a sliding window limits them. Norms, softmax and other elementwise work do not count, by custom. MTP modules do not
    count either.
    """
    attended = sum(min(seq_len / 2, window or seq_len) for window in config.layer_windows)
    return 2 * _matmul_parameters(config, every_expert=False) + _score_flops(config) * attended


def training_flops_per_token(config: ModelConfig, seq_len: float, *, frozen: bool = False) -> float:
    """Returns the FLOPs of one token in a training step: three times the forward pass.

    The backward pass computes two gradients per matmul. Recomputation does not count. MTP modules count, each with the
    vocabulary projection. Qwen3-30B-A3B at seq_len 4096: 23.1e9.

    Args:
      frozen: the weights get no gradients, which leaves one gradient per matmul with a weight. Adapters do not count.
    """
    scores = len(config.mtp_stages) * _score_flops(config) * seq_len / 2
    modules = 2 * _mtp_matmul_parameters(config, every_expert=False) + scores
    whole = 3 * (forward_flops_per_token(config, seq_len) + modules)
    of_weights = 2 * (_matmul_parameters(config, every_expert=False) + _mtp_matmul_parameters(config, every_expert=False))
    return whole - of_weights if frozen else whole


def _score_flops(config: Any) -> int:
    """Returns the FLOPs of a token and one key that it attends to in one layer."""
    return 2 * config.num_attention_heads * (config.key_dim + config.value_dim)


def _matmul_parameters(config: Any, *, every_expert: bool) -> int:
    """Returns the weights of all matmuls of the model's layers and vocabulary projection.

    A sparse layer counts all its experts if `every_expert`, else the k experts of one token.
    """
    layers = sum(stage.num_layers * _layer_matrices(config, stage.sparse, every_expert) for stage in config.stages)
    return layers + config.vocab_size * config.hidden_size


def _mtp_matmul_parameters(config: Any, *, every_expert: bool) -> int:
    """Returns the weights of all matmuls of the MTP modules: a layer, its input projection, the vocabulary projection."""
    others = config.hidden_size * (2 * config.hidden_size + config.vocab_size)
    return sum(_layer_matrices(config, stage.sparse, every_expert) + others for stage in config.mtp_stages)


def _layer_matrices(config: Any, sparse: bool, every_expert: bool) -> int:
    hidden, attention = config.hidden_size, attention_matrices(config)
    if not sparse:
        return attention + 3 * hidden * config.intermediate_size
    experts = config.experts
    routed = experts.num_experts if every_expert else experts.num_experts_per_tok
    inter = routed * experts.moe_intermediate_size + experts.shared_intermediate_size
    return attention + hidden * (3 * inter + experts.num_experts)


def attention_matrices(config: Any) -> int:
    """Returns the matmul weights of one layer's attention, without norms and biases."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if isinstance(config, DeepseekV3Config):
        queries, rank = heads * config.key_dim, config.q_lora_rank
        query_weights = hidden * queries if rank is None else hidden * rank + rank * queries
        key_weights = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        key_weights += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        return query_weights + key_weights + heads * config.v_head_dim * hidden
    return 2 * hidden * config.head_dim * (heads + config.num_key_value_heads)


def _attention_vectors(config: Any) -> int:
    """Returns the parameters of norms and biases inside one layer's attention."""
    if isinstance(config, DeepseekV3Config):
        ranks = config.kv_lora_rank + (config.q_lora_rank or 0)
        biases = ranks + config.qk_rope_head_dim + config.hidden_size
        return ranks + (biases if config.attention_bias else 0)
    biases = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim + config.hidden_size
    return 2 * config.head_dim + (biases if config.attention_bias else 0)
