"""How many parameters a config has and how many floating-point operations a token costs: what speed is measured against."""

from typing import Any

from moe_jax.config import DeepseekV3Config, ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """All trained parameters; what is shared counts once. Qwen3-30B-A3B: 30.5e9; DeepSeek-V3: 671.0e9, and 11.6e9 in its module
    that predicts a further token."""
    norms = 2 * config.num_hidden_layers * config.hidden_size + config.hidden_size
    vectors = config.num_hidden_layers * _attention_vectors(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    modules = _mtp_matmul_parameters(config, every_expert=True) + len(config.mtp_stages) * (
        5 * config.hidden_size + _attention_vectors(config) - config.vocab_size * config.hidden_size
    )
    return _matmul_parameters(config, every_expert=True) + embedding + norms + vectors + modules


def num_active_parameters(config: ModelConfig) -> int:
    """The parameters that a token passes through, the embedding table included; modules that predict further tokens are not.

    Qwen3-30B-A3B: 3.35e9, DeepSeek-V3: 37.6e9.
    """
    inactive = _matmul_parameters(config, every_expert=True) - _matmul_parameters(config, every_expert=False)
    return num_parameters(config.without_mtp()) - inactive


def forward_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """2 FLOPs per weight of each matmul that a token passes, and 2 * heads * (key_dim + value_dim) per key it attends to.

    A token of a causal sequence sees seq_len / 2 keys on average; a sliding window limits them. Norms, softmax and the like
    are left out, as is customary, and so are modules that predict further tokens.
    """
    attended = sum(min(seq_len / 2, window or seq_len) for window in config.layer_windows)
    return 2 * _matmul_parameters(config, every_expert=False) + _score_flops(config) * attended


def training_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Three times the forward pass: the backward pass makes two gradients per matmul. Recomputation does not count.

    Modules that predict further tokens are trained too, each with the vocabulary projection. Qwen3-30B-A3B at seq_len 4096:
    23.1e9.
    """
    scores = len(config.mtp_stages) * _score_flops(config) * seq_len / 2
    modules = 2 * _mtp_matmul_parameters(config, every_expert=False) + scores
    return 3 * (forward_flops_per_token(config, seq_len) + modules)


def _score_flops(config: Any) -> int:
    """Of a token and a key that it attends to in one layer."""
    return 2 * config.num_attention_heads * (config.key_dim + config.value_dim)


def _matmul_parameters(config: Any, *, every_expert: bool) -> int:
    """Weights of attention, feed-forward blocks, routers and the vocabulary projection; of k experts or of all."""
    layers = sum(stage.num_layers * _layer_matrices(config, stage.sparse, every_expert) for stage in config.stages)
    return layers + config.vocab_size * config.hidden_size


def _mtp_matmul_parameters(config: Any, *, every_expert: bool) -> int:
    """The same of the modules that predict further tokens: a layer, the projection to its input, the vocabulary's again."""
    others = config.hidden_size * (2 * config.hidden_size + config.vocab_size)
    return sum(_layer_matrices(config, stage.sparse, every_expert) + others for stage in config.mtp_stages)


def _layer_matrices(config: Any, sparse: bool, every_expert: bool) -> int:
    hidden, attention = config.hidden_size, attention_matrices(config)
    if not sparse:
        return attention + 3 * hidden * config.intermediate_size
    experts = config.num_experts if every_expert else config.num_experts_per_tok
    experts += getattr(config, "n_shared_experts", 0)
    return attention + hidden * (3 * experts * config.moe_intermediate_size + config.num_experts)


def attention_matrices(config: Any) -> int:
    """Weights of one layer's attention, without norms and biases."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if isinstance(config, DeepseekV3Config):
        queries, rank = heads * config.key_dim, config.q_lora_rank
        of_queries = hidden * queries if rank is None else hidden * rank + rank * queries
        of_keys = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        of_keys += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        return of_queries + of_keys + heads * config.v_head_dim * hidden
    return 2 * hidden * config.head_dim * (heads + config.num_key_value_heads)


def _attention_vectors(config: Any) -> int:
    """Norms and biases inside one layer's attention."""
    if isinstance(config, DeepseekV3Config):
        ranks = config.kv_lora_rank + (config.q_lora_rank or 0)
        biases = ranks + config.qk_rope_head_dim + config.hidden_size
        return ranks + (biases if config.attention_bias else 0)
    biases = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim + config.hidden_size
    return 2 * config.head_dim + (biases if config.attention_bias else 0)
