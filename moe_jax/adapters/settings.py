"""Settings of adapters: the matrices that get one, and the ranks and scales."""

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_TARGETS = "attention", "mlp", "experts"
"""The targets of `targets=None`; targets that a model lacks are skipped."""


@dataclass(frozen=True)
class LoraSettings:
    """The adapters of a model: each adds scale * b a to a matrix, with scale = alpha / its rank.

    Experts share the rank: by default each has the rank divided by `num_experts_per_tok`, the number of experts of a token
    (Schulman, 2025, https://thinkingmachines.ai/blog/lora). So 32 is 4 for each of Qwen3-30B-A3B's experts.

    Attributes:
      rank: the rank of every adapter except the experts'.
      alpha: the numerator of the scale.
      targets: the matrices. "attention" are all projections of attention, "mlp" dense blocks and shared experts, "experts" the
        routed experts, "router" the choice of experts. A single projection of attention may be named, such as "q_proj".
        "embedding" and "head" (or "embed_tokens" and "lm_head") are the two tables of the vocabulary, if they are not tied.
        None: attention, mlp and experts, as far as the model has them. Everything else stays frozen.
      ranks: overrides the ranks of single targets, such as {"experts": 16, "q_proj": 64}.
      shared_outer: all experts of a layer share the factors on the side of the hidden states.
      use_rslora: scale = alpha / sqrt(rank) (Kalajdzievski, 2023, https://arxiv.org/abs/2312.03732).
      modules_to_save: modules whose weights are trained as a whole in f32, by the ends of their names on the hub, as in PEFT.
        Possible names are "lm_head" and "embed_tokens" if they are not tied, "gate" for routers, and "norm" for all norms.
      trainable_token_indices: tokens whose rows of the embedding, and of a head that is not tied, are trained alone in f32, as
        in PEFT. Ids after the vocabulary's last extend it; their rows start as the mean of the others.
      dropout: the probability with which an element of a's input is dropped in training; for attention and mlp.

    Raises:
      ValueError: a rank below 1, an alpha that is not positive, a dropout outside [0, 1), or no targets.
    """

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    shared_outer: bool = False
    use_rslora: bool = False
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] = ()

    def __post_init__(self):
        for name, rank in {"rank": self.rank, **{f"ranks[{name!r}]": rank for name, rank in self.ranks.items()}}.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise ValueError(f"LoraSettings: {name}={rank!r} must be an integer of at least 1")
        if not self.alpha > 0:
            raise ValueError(f"LoraSettings: alpha={self.alpha!r} must be greater than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoraSettings: dropout={self.dropout!r} must be a number from 0 to below 1")
        if isinstance(self.modules_to_save, str) or not all(self.modules_to_save):
            raise ValueError(f"LoraSettings: modules_to_save={self.modules_to_save!r} must be a tuple of names")
        if isinstance(self.targets, str) or (self.targets is not None and not self.targets):
            raise ValueError(f"LoraSettings: targets={self.targets!r} must be a tuple of names, or None")

    def rank_of(self, kind: str, name: str, active_experts: int) -> int:
        """Returns the rank of a matrix.

        Args:
          kind: "attention", "mlp", "experts", "router", "embedding" or "head".
          name: the matrix's name in its layer, such as "q_proj".
          active_experts: the number of experts per token; only used for experts.
        """
        default = max(1, self.rank // active_experts) if kind == "experts" else self.rank
        return self.ranks.get(name, self.ranks.get(kind, default))

    def scale_of(self, rank: int) -> float:
        """Returns the factor on the change of an adapter of this rank."""
        return self.alpha / (rank**0.5 if self.use_rslora else rank)
