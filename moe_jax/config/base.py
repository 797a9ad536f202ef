"""Base of the configurations of all architectures: frozen dataclasses that check their values."""

import functools
import itertools
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from moe_jax.config.specs import ExpertsSpec, HeadsSpec, Mixer, Shapes


@dataclass(frozen=True)
class RopeParameters:
    """Parameters of the rotary frequencies, with transformers' names.

    transformers 5 writes these fields as `rope_parameters`; files of the hub have `rope_theta` and `rope_scaling`. The types
    linear, dynamic and yarn use `factor`. Only yarn uses the fields below it, with one exception: DeepSeek's attention uses
    `mscale_all_dim` with every type except the default.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def problems(self) -> list[str]:
        """Returns one message per invalid field, such as "factor=0 must be above 0"; empty if all are valid."""
        problems = [f"rope field {problem}" for problem in wrong_types(vars(self), get_type_hints(type(self)))]
        for name in ("rope_theta", "factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if not problems and value is not None and value <= 0:
                problems.append(f"rope field {name}={value} must be positive")
        return problems

    def yarn_factor(self, max_position_embeddings: int) -> float:
        """Returns yarn's scaling of positions: `factor`, or if None `max_position_embeddings` / the original length."""
        original_length = self.original_max_position_embeddings or max_position_embeddings
        return self.factor if self.factor is not None else max_position_embeddings / original_length


@dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer: layers of one kind run the same code on different weights and window sizes."""

    mixer: Mixer
    sparse: bool
    """True for a mixture of experts, False for a dense feed-forward block."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that repeat a pattern of kinds (the body); `layers.passes` runs one body per iteration.

    Layer first_layer + repeat * len(body) + place is of kind body[place]. Each place's parameters are stacked over the repeats.
    The kinds of a body are all sparse or all dense.
    """

    first_layer: int
    repeats: int
    body: tuple[LayerKind, ...]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.repeats * len(self.body)

    @property
    def sparse(self) -> bool:
        """True if the layers have a mixture of experts."""
        return self.body[0].sparse

    @property
    def layers(self) -> range:
        """The indices of the layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Fields of every decoder, with the names of Hugging Face's config.json.

    Raises:
      ValueError: the values describe no model, or an unsupported one; one error lists all problems.
      NotImplementedError: a subclass does not define the experts of its sparse layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters = RopeParameters()
    attention_bias: bool = False
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    """Fields that must be integers above zero."""
    supported: ClassVar[dict[str, tuple]] = {
        "pruned_heads": ({}, None),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
    }
    """Fields of config.json that are no fields here, with the values (the usual one first) that have no effect."""
    hub_names: ClassVar[dict[str, str]] = {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }
    """{part of a parameter's path inside its layer: its name in checkpoints}, where these differ (`checkpoint.hf_names`)."""
    module_names: ClassVar[dict[str, str]] = {}
    """{name of a module in checkpoints: its name in transformers}, with a dot at the end, where they differ.

    PEFT's files may use either name.
    """
    fused_experts: ClassVar[bool] = False
    """True if checkpoints have one tensor [experts, in, out] for each matrix of a layer's experts, with gate and up in turn."""
    per_layer: ClassVar[frozenset[str]] = frozenset()
    """Fields of config.json that may be a list with a value for each layer."""
    hub_rows: ClassVar[tuple[str, ...]] = ()
    """Ends of the checkpoints' names of vectors that are stored as a matrix with one row."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of checkpoint tensors that this library does not read, such as "mtp"."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors that checkpoints may lack; such tensors are zeros."""

    def __post_init__(self):
        problems = wrong_types(vars(self), get_type_hints(type(self)), self.positive)
        problems += [] if problems else self.rope_parameters.problems()
        problems = problems or self.problems()
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))
        if (self.experts is None) != (not self.routed_layers):
            raise NotImplementedError(
                f"{type(self).__name__}.experts is {self.experts} with sparse layers {self.routed_layers}: a config class with "
                "sparse layers must return their ExpertsSpec, any other None"
            )
        for kept in ("of_token", "of_sequence"):
            if len(shapes := {getattr(mixer, kept) for mixer in self.layer_mixers} - {()}) > 1:
                raise NotImplementedError(
                    f"{type(self).__name__}.layer_mixers keep arrays of several shapes {kept.replace('_', ' a ')}, {shapes}: a "
                    "cache holds arrays of one shape"
                )

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = []
        if self.hidden_act != "silu":
            problems.append(f"hidden_act={self.hidden_act!r} is not supported (only 'silu')")
        if self.attention_dropout:
            problems.append(f"attention_dropout={self.attention_dropout} is not supported (only 0)")
        not_negative = {name: value for name, value in vars(self).items() if name in _NOT_NEGATIVE}
        return problems + [f"{name}={value} must be 0 or more" for name, value in not_negative.items() if not value >= 0]

    @property
    def known_positions(self) -> int:
        """The longest supported context in tokens: max_position_embeddings, or more if yarn scaling extends it."""
        rope, known = self.rope_parameters, self.max_position_embeddings
        if rope.rope_type != "yarn":
            return known
        return max(known, int(rope.yarn_factor(known) * (rope.original_max_position_embeddings or known)))

    @property
    def mixer(self) -> HeadsSpec:
        """The attention spec of each layer. Every config class defines this property."""
        raise NotImplementedError(f"{type(self).__name__} must define the property mixer")

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of each head that rotary embeddings rotate."""
        return self.mixer.rotary_dim

    @property
    def cache_shapes(self) -> Shapes:
        """Shapes of one token's entries in a layer's cache: its keys and values, or its latent."""
        return self.mixer.of_token

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse. Every config class defines this property."""
        raise NotImplementedError(f"{type(self).__name__} must define the property experts")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return ()

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens (a token attends to itself and window - 1 before it); None: no limit."""
        return (None,) * self.num_hidden_layers

    # `moe-jax plan` reads this, `stages` and `routed_layers` 100,000 times.
    @functools.cached_property
    def layer_mixers(self) -> tuple[Mixer, ...]:
        """The mixer spec of each layer: `mixer` for all layers unless a config class overrides this."""
        return (self.mixer,) * self.num_hidden_layers

    def mixer_refusal(self, work: str, *, has_sinks: bool = True) -> str | None:
        """Returns why this model cannot do `work`, for which recurrent layers are unsupported; None if it can.

        Args:
          has_sinks: True if the work supports attention sinks.
        """
        recurrent = [layer for layer, mixer in enumerate(self.layer_mixers) if mixer.of_sequence]
        if not recurrent:
            return f"{work} has no sinks, and this model's attention has" if self.mixer.sinks and not has_sinks else None
        return (
            f"{work} needs the keys and values of each token in each layer; {len(recurrent)} of {self.num_hidden_layers} "
            f"layers (first: layer {recurrent[0]}, {self.layer_mixers[recurrent[0]].name}) keep a state of the sequence instead"
        )

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The model's layers grouped into stages, in order."""
        sparse_layers = frozenset(self.moe_layers)
        return _stages(tuple(LayerKind(mixer, i in sparse_layers) for i, mixer in enumerate(self.layer_mixers)))

    @property
    def mtp_stages(self) -> tuple[Stage, ...]:
        """The multi-token prediction (MTP) modules as stages of one layer each, after the last layer (`models.mtp`)."""
        return ()

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stages of the layers, then of the MTP modules."""
        return (*self.stages, *self.mtp_stages)

    @functools.cached_property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of all layers with a router, including layers of MTP modules."""
        return (*self.moe_layers, *(stage.first_layer for stage in self.mtp_stages if stage.sparse))

    def with_layers(self, number: int) -> Self:
        """Returns this config with its first layers alone."""
        kinds = getattr(self, "layer_types", None)
        return replace(self, num_hidden_layers=number, **({} if kinds is None else {"layer_types": kinds[:number]}))

    def without_mtp(self) -> Self:
        """Returns this config without MTP modules."""
        return self

    @classmethod
    def read_rope(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Converts rope fields of config.json that only this class has, in place, before the others are read."""

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Converts any supported dialect of config.json to this class's field names, in place; appends errors to `problems`."""
        for name, values in cls.supported.items():
            if (value := given.pop(name, None)) not in values:
                problems.append(f"{name}={json.dumps(value)} is not supported (only {json.dumps(values[0])})")
        if given.get("num_key_value_heads", 0) is None:
            given["num_key_value_heads"] = value_of(cls, given, "num_attention_heads")

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Converts this class's field names to the Hugging Face hub's, in place."""


_NOT_NEGATIVE = frozenset(
    "rms_norm_eps initializer_range router_aux_loss_coef aux_loss_alpha moe_norm_min "
    "n_shared_experts first_k_dense_replace num_nextn_predict_layers".split()
)
"""Fields that must be 0 or more in each class that has them."""


@functools.cache
def _stages(kinds: tuple[LayerKind, ...]) -> tuple[Stage, ...]:
    """Groups layers of these kinds into stages.

    Each stage has the pattern that covers the most layers, and the shortest such pattern. A pattern repeats at least twice.
    """
    stages: list[Stage] = []
    for _, run in itertools.groupby(kinds, lambda kind: kind.sparse):
        left = tuple(run)
        while left:
            patterns = {size: _repeats(left, size) for size in range(1, len(left) // 2 + 1)}
            patterns = {1: _repeats(left, 1)} | {size: repeats for size, repeats in patterns.items() if repeats > 1}
            size = max(patterns, key=lambda size: (size * patterns[size], -size))
            stages.append(Stage(stages[-1].layers.stop if stages else 0, patterns[size], left[:size]))
            left = left[stages[-1].num_layers :]
    return tuple(stages)


def _repeats(kinds: tuple[LayerKind, ...], size: int) -> int:
    """Returns how many times the first `size` kinds repeat at the beginning of `kinds`."""
    alike = itertools.takewhile(lambda i: kinds[i : i + size] == kinds[:size], range(0, len(kinds) - size + 1, size))
    return sum(1 for _ in alike)


def value_of(cls: type[ModelConfig], given: dict[str, Any], name: str) -> Any:
    """Returns the value given for a config field, or the field's default."""
    return given.get(name, getattr(cls, name))


def rename(given: dict[str, Any], old: str, new: str, problems: list[str]) -> None:
    """Renames the field `old` to `new`; appends to `problems` if both are given with different values."""
    if old in given:
        value = given.pop(old)
        if given.setdefault(new, value) != value:
            problems.append(f"{old}={value} contradicts {new}={given[new]}")


def is_positive(value: Any) -> bool:
    """Returns True if `value` is an integer above zero."""
    return _is_of(value, int) and value > 0


def wrong_types(values: dict[str, Any], types: dict[str, Any], positive: Collection[str] = ()) -> list[str]:
    """Returns one message per value that does not have its type, such as "head_dim='8' must be an integer or null".

    Args:
      types: {name: type}; values of other names are not checked.
      positive: names whose values must be integers above zero.
    """
    problems = []
    for name, value in values.items():
        if name in positive and not is_positive(value):
            problems.append(f"{name}={value!r} must be a positive integer")
        elif name in types and not _is_of(value, types[name]):
            problems.append(f"{name}={value!r} must be {_name(types[name])}")
    return problems


def _is_of(value: Any, kind: Any) -> bool:
    """Returns True if a config value is of the annotated type. An integer is also a number; a null flag counts as unset."""
    if get_origin(kind) is UnionType:
        return any(_is_of(value, choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if kind is bool:
        return value is None or isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _name(kind: Any) -> str:
    """Returns the name of the type in config.json."""
    if get_origin(kind) is UnionType:
        return " or ".join(map(_name, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list (in Python a tuple), each entry {_name(get_args(kind)[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(kind, kind.__name__)
