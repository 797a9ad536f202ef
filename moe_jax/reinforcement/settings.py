"""The choice of a policy loss and its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal, get_args

Loss = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
Kl = Literal["k1", "k2", "k3"]
AdvantageScale = Literal["group", "none", "gdpo"]
Importance = Literal["none", "tis", "icepop"]
Level = Literal["token", "sequence"]
KeptGroups = Literal["all", "with_spread"]

CLIP = {"gspo": (3e-4, 4e-4)}
"""{loss: the defaults of (clip_low, clip_high)}, for ratios of whole answers; ratios of tokens have `TOKEN_CLIP`."""
TOKEN_CLIP = 0.2, 0.28
ONE_OF = {
    "loss": Loss, "kl": Kl, "advantage_scale": AdvantageScale, "importance": Importance, "importance_level": Level,
    "keep_groups": KeptGroups,
}  # fmt: skip
"""{field: its texts}. `None` is allowed where it is the default."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A policy loss, its advantages, and how answers are drawn. `PolicySettings` checks the values.

    `reinforcement.losses` and `reinforcement.advantages` have the formulas.

    Attributes:
      loss: "dapo" and "cispo" are means over all tokens of a batch, "grpo" and "gspo" means over samples of means over tokens.
        "dr_grpo" divides by samples * max_new_tokens. "gspo" has one ratio for each answer, and "cispo" clips no gradient.
      clip_low, clip_high: ratios outside [1 - clip_low, 1 + clip_high] have no gradient; not for cispo. None: 0.2 and 0.28, for
        gspo 3e-4 and 4e-4.
      dual_clip: maximum ratio of tokens with negative advantages, greater than 1 + clip_high; None: no maximum.
      cispo_cap: maximum ratio; for cispo.
      off_policy_threshold: maximum mean of log b - log p of samples with a negative advantage; others have no loss. None: none.
      beta: the coefficient of the KL divergence from a reference. 0: no reference is needed.
      kl: the estimator of the KL divergence.
      kl_bias_correction: multiply the estimator by the ratio, so that its gradient is that of the KL divergence.
      advantage_scale: "group" divides advantages by the group's standard deviation. "gdpo" divides each function's rewards by
        it before their sum, and the sums by the batch's (GDPO). None: "none" for dr_grpo, else "group".
      mask_truncated: True: answers cut at max_new_tokens are not learned. They still count in their group's mean and deviation.
      overlong_buffer: the number of tokens before max_new_tokens in which a penalty grows; 0: no penalty.
      overlong_factor: the penalty of an answer of max_new_tokens.
      keep_groups: "with_spread" drops groups whose rewards are all equal.
      importance: factor p / b for values of p that differ from the sampler's b: "tis" clips it to [importance_low,
        importance_high], "icepop" drops tokens outside.
      importance_level: "token", or "sequence" for one factor of the whole answer.
      importance_low, importance_high: the range of the factor.
      balance_coef: the coefficient of the router's load-balancing loss.
      temperature: sampling temperature. Log-probabilities are of logits / temperature everywhere.
    """

    loss: Loss = "dapo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    cispo_cap: float = 5.0
    off_policy_threshold: float | None = None
    beta: float = 0.0
    kl: Kl = "k3"
    kl_bias_correction: bool = True
    advantage_scale: AdvantageScale | None = None
    mask_truncated: bool = False
    overlong_buffer: int = 0
    overlong_factor: float = 1.0
    keep_groups: KeptGroups = "all"
    importance: Importance = "none"
    importance_level: Level = "token"
    importance_low: float = 0.0
    importance_high: float = 2.0
    balance_coef: float = 0.0
    temperature: float = 1.0

    @property
    def clip(self) -> tuple[float, float]:
        """The values of (clip_low, clip_high), or their defaults."""
        low, high = CLIP.get(self.loss, TOKEN_CLIP)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def scales_advantages(self) -> bool:
        """True if advantages are divided by their group's standard deviation."""
        return self.loss != "dr_grpo" if self.advantage_scale is None else self.advantage_scale != "none"

    @property
    def needs_whole_samples(self) -> bool:
        """True if the loss has sums over a sample's tokens, which one device must hold."""
        of_samples = self.importance != "none" and self.importance_level == "sequence"
        return self.loss == "gspo" or of_samples or self.off_policy_threshold is not None


@dataclass(frozen=True, kw_only=True)
class PolicySettings(LossSettings):
    """The settings of a policy: its loss, and the answers of a step. Wrong values raise a ValueError.

    Attributes:
      reward_weights: a weight for each reward function; None: all 1.
      exact: the sampler's log-probabilities equal the training model's bit for bit. The loss then has their values and the
        gradients of the ordinary forward pass.
      samples: answers to a prompt.
      max_new_tokens: maximum number of tokens that the model writes in an answer.
    """

    reward_weights: tuple[float, ...] | None = None
    exact: bool = False
    samples: int = 8
    max_new_tokens: int = 1024

    def __post_init__(self):
        if problems := _problems(self):
            raise ValueError("PolicySettings: " + "; ".join(problems))


def mesh_problems(mesh: Mapping[str, int], replicas: int | None, exact: bool, adapted: bool) -> list[str]:
    """Returns the reasons why a policy cannot learn on a mesh, one clause each.

    Args:
      mesh: the number of devices along each axis.
      replicas: the number of devices that draw; None: all.
      adapted: True if adapters are trained.
    """
    devices = prod(mesh.values())
    problems = [
        f"reinforcement learning splits its mesh over data and fsdp alone: leave out {axis}={size}"
        for axis, size in mesh.items()
        if size > 1 and axis not in ("data", "fsdp")
    ]
    if devices > 1 and replicas not in (None, devices):
        problems.append(f"replicas={replicas} must be {devices}, the devices of the mesh: each of them draws")
    if exact and adapted and mesh.get("fsdp", 1) > 1:
        problems.append(
            f"exact=True merges adapters into matrices that each device has whole, and fsdp={mesh['fsdp']} splits them: use "
            "data, or exact=False"
        )
    return problems


def _problems(settings: PolicySettings) -> list[str]:
    problems = []
    for name, texts in ONE_OF.items():
        value = getattr(settings, name)
        if value not in get_args(texts) and not (value is None and getattr(PolicySettings, name) is None):
            problems.append(f"{name}={value!r} must be one of {', '.join(get_args(texts))}")
    if problems:
        return problems
    for wanted, fits, names in (
        ("True or False", lambda x: isinstance(x, bool), "kl_bias_correction mask_truncated exact"),
        ("an integer of at least 2", lambda x: _is_integer(x) and x >= 2, "samples"),
        ("an integer of at least 1", lambda x: _is_integer(x) and x >= 1, "max_new_tokens"),
        ("an integer of at least 0", lambda x: _is_integer(x) and x >= 0, "overlong_buffer"),
        ("a number greater than 0", lambda x: _is_number(x) and x > 0, "temperature cispo_cap"),
        ("a number of at least 0", lambda x: _is_number(x) and x >= 0,
         "beta balance_coef overlong_factor importance_low importance_high"),
        ("at least 0", lambda x: x is None or (_is_number(x) and x >= 0), "clip_low clip_high dual_clip off_policy_threshold"),
        ("a tuple of numbers", lambda x: x is None or (isinstance(x, tuple) and all(map(_is_number, x))), "reward_weights"),
    ):  # fmt: skip
        for name in names.split():
            if not fits(getattr(settings, name)):
                problems.append(f"{name}={getattr(settings, name)!r} must be {wanted}")
    return problems or _conflicts(settings)


def _conflicts(settings: PolicySettings) -> list[str]:
    """Returns problems of values that are right alone."""
    problems, is_cispo, high = [], settings.loss == "cispo", 1 + settings.clip[1]
    if settings.overlong_buffer > settings.max_new_tokens:
        problems.append(f"overlong_buffer={settings.overlong_buffer} must not exceed max_new_tokens={settings.max_new_tokens}")
    if settings.dual_clip is not None and settings.dual_clip <= high:
        problems.append(f"dual_clip={settings.dual_clip!r} must be greater than 1 + clip_high = {high:g}")
    if settings.importance_low > settings.importance_high:
        high = settings.importance_high
        problems.append(f"importance_low={settings.importance_low!r} must not exceed importance_high={high!r}")
    if settings.exact and settings.importance != "none":
        problems.append(
            f"importance={settings.importance!r} corrects a difference that exact=True excludes: leave out one of both"
        )
    for name in ("clip_low", "clip_high", "dual_clip") if is_cispo else ("cispo_cap",):
        if getattr(settings, name) != getattr(PolicySettings, name):
            problems.append(f"{name}={getattr(settings, name)!r} is not read by loss={settings.loss!r}: leave it out")
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
