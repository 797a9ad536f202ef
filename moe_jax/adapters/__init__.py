"""Adapters (LoRA): train a small change of each matrix on frozen weights, for attention and experts alike.

model = moe_jax.from_pretrained("Qwen/Qwen3-30B-A3B")
print(adapters.add_lora(model, adapters.LoraSettings(rank=32), rngs=nnx.Rngs(0)))
state = train.init_state(model, optimizer)               # only the adapters
...
adapters.save_adapter(model, "adapter")                  # for PEFT, vLLM, SGLang and `load_adapter`
adapters.merge_adapter(model)                            # a plain model again
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.adapters.add import LoraSummary, add_lora, lora_summary
    from moe_jax.adapters.load import load_adapter
    from moe_jax.adapters.merge import merge_adapter, without_adapter
    from moe_jax.adapters.save import save_adapter
    from moe_jax.adapters.settings import LoraSettings
    from moe_jax.adapters.several import NamedAdapters, load_adapters

__all__ = [
    "LoraSettings", "LoraSummary", "NamedAdapters", "add_lora", "load_adapter", "load_adapters", "lora_summary",
    "merge_adapter", "save_adapter", "without_adapter",
]  # fmt: skip

export_lazily(__name__)
