"""How many parameters a config has and how many floating-point operations a token costs: what speed is measured against."""

from moe_jax.config import Qwen3Config, Qwen3MoeConfig


def num_parameters(config: Qwen3Config) -> int:
    """All parameters; a tied embedding counts once. Qwen3-30B-A3B: 30.5e9."""
    norms = 2 * config.num_hidden_layers * (config.hidden_size + config.head_dim) + config.hidden_size
    biases = config.num_hidden_layers * _attention_biases(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return _matmul_parameters(config, every_expert=True) + embedding + norms + biases


def num_active_parameters(config: Qwen3Config) -> int:
    """The parameters that one token passes through, the embedding table included. Qwen3-30B-A3B: 3.35e9."""
    inactive = _matmul_parameters(config, every_expert=True) - _matmul_parameters(config, every_expert=False)
    return num_parameters(config) - inactive


def forward_flops_per_token(config: Qwen3Config, seq_len: float) -> float:
    """2 FLOPs per weight of each matmul that a token passes, and 4 * heads * head_dim per key it attends to.

    A token of a causal sequence sees seq_len / 2 keys on average; a sliding window limits them. Norms, softmax and the like
    are left out, as is customary.
    """
    attended = sum(min(seq_len / 2, window or seq_len) for window in config.layer_windows)
    scores = 4 * config.num_attention_heads * config.head_dim * attended
    return 2 * _matmul_parameters(config, every_expert=False) + scores


def training_flops_per_token(config: Qwen3Config, seq_len: float) -> float:
    """Three times the forward pass: the backward pass makes two gradients per matmul. Recomputation does not count.

    Qwen3-30B-A3B at seq_len 4096: 23.1e9.
    """
    return 3 * forward_flops_per_token(config, seq_len)


def _matmul_parameters(config: Qwen3Config, *, every_expert: bool) -> int:
    """Weights of attention, feed-forward blocks, routers and the vocabulary projection; of k experts or of all."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = config.num_hidden_layers * (2 * hidden * heads + 2 * hidden * keys)
    num_sparse = len(config.moe_layers)
    dense = (config.num_hidden_layers - num_sparse) * 3 * hidden * config.intermediate_size
    sparse = 0
    if isinstance(config, Qwen3MoeConfig):
        experts = config.num_experts if every_expert else config.num_experts_per_tok
        sparse = num_sparse * hidden * (3 * experts * config.moe_intermediate_size + config.num_experts)
    return attention + dense + sparse + config.vocab_size * hidden


def _attention_biases(config: Qwen3Config) -> int:
    if not config.attention_bias:
        return 0
    return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim + config.hidden_size
