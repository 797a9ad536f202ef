"""A tokenizer, texts, models and settings small enough to train in a test."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import transformers
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import moe_jax
from moe_jax.recipes import FinetuneSettings
from moe_jax.train.data.chat import chat_tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(chat_template: str | None = CHATML):
    """Bytes as tokens, and three special tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(
        ["plain words"],
        trainers.BpeTrainer(
            vocab_size=259, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", additional_special_tokens=specials[1:]
    )
    wrapped.chat_template = chat_template
    return wrapped


def trl_template(name):
    """Returns TRL's copy of a model's own chat template."""
    found = importlib.util.find_spec("trl")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def learned(tokenizer, chat, tools=None, **options):
    """Returns the texts of a conversation that are learned."""
    tokens, mask = chat_tokens(tokenizer, chat, tools, **options)
    edges = np.flatnonzero(np.diff((mask != 0).astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(tokens[first:end]) for first, end in edges]


def tokenizer_with_a_beginning():
    """Returns `tokenizer` with a special token, 1, before each text that no template has rendered."""
    made = tokenizer()
    begins = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    made.backend_tokenizer.post_processor = begins
    return made


QWEN3 = dict(
    vocab_size=264,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.1,
)


def model(**options):
    """Two layers with four experts; a token uses two."""
    return _with_experts({}, 16, {"dtype": jnp.float32, **options})


def model_for_fp8(**options):
    """Two layers with four experts of sizes that FP8 takes, which compute in bf16."""
    return _with_experts({"hidden_size": 128}, 128, {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, **options})


def _with_experts(sizes, moe_intermediate_size, options):
    config = moe_jax.Qwen3MoeConfig(
        **{**QWEN3, **sizes},
        moe_intermediate_size=moe_intermediate_size,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
    )
    return moe_jax.from_config(config, rngs=nnx.Rngs(0), **options)


def dense(**options):
    """Two layers without experts."""
    config = moe_jax.Qwen3Config(**QWEN3)
    return moe_jax.from_config(config, **{"rngs": nnx.Rngs(0), "dtype": jnp.float32, **options})


def deepseek(mtp=0, layers=3, vocab_size=264, **options):
    """A dense layer, and two with eight experts in four groups and a shared expert. A token uses two experts of two groups.

    `mtp` is the number of modules that predict further tokens.
    """
    config = deepseek_config(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_nextn_predict_layers=mtp,
    )
    made = moe_jax.from_config(config, rngs=nnx.Rngs(0), **{"dtype": jnp.float32, **options})
    for stage in made.stages[1:]:
        bias = getattr(stage, "block", stage).mlp.router.expert_bias
        bias[...] = jnp.linspace(-0.1, 0.1, bias.size, dtype=jnp.float32).reshape(bias.shape)
    return made


def biased_model(**options):
    """Two layers with four experts, biases of zero, and a shared expert. A token uses two."""
    config = deepseek_config(
        num_hidden_layers=2, first_k_dense_replace=0, n_routed_experts=4, n_group=1, topk_group=1, num_nextn_predict_layers=0
    )
    return moe_jax.from_config(config, rngs=nnx.Rngs(0), **{"dtype": jnp.float32, **options})


def deepseek_config(vocab_size=264, **sizes):
    return moe_jax.DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts_per_tok=2,
        initializer_range=0.1,
        **sizes,
    )


def write_texts(folder: Path) -> Path:
    """Nine small text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"text {i}: " + "the same words come again and again. " * (i + 1))
    return folder


def settings(folder: Path, **changes) -> FinetuneSettings:
    """Returns settings of a run in the folder, on texts there."""
    data = write_texts(folder / "texts")
    options = dict(
        model="none", data=str(data), output=str(folder / "run"), seq_len=32, batch_size=4, steps=30, learning_rate=2e-2,
        warmup_steps=2, dtype="float32",
    )  # fmt: skip
    return FinetuneSettings(**{**options, **changes})
