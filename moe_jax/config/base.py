"""What the configurations of all architectures have in common: frozen dataclasses that check their values."""

import dataclasses
import json
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class RopeParameters:
    """How rotary frequencies are made; the fields of transformers' `rope_parameters` (hub: `rope_theta` and `rope_scaling`).

    `factor` is used by linear, dynamic and yarn; all below it by yarn alone, but for `mscale_all_dim`, which DeepSeek's
    attention takes with any but the default type.
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
        """What is wrong with the values, each as one clause."""
        problems = [f"rope field {problem}" for problem in wrong_types(self)]
        for name in ("rope_theta", "factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if not problems and value is not None and value <= 0:
                problems.append(f"rope field {name}={value} must be positive")
        return problems

    def yarn_factor(self, max_position_embeddings: int) -> float:
        """By how much yarn stretches positions: `factor`, or where that is None this length over the original one."""
        original_length = self.original_max_position_embeddings or max_position_embeddings
        return self.factor if self.factor is not None else max_position_embeddings / original_length


@dataclass(frozen=True)
class Stage:
    """A run of neighbouring layers of one kind, stored stacked and run by `layers.stack`."""

    first_layer: int
    num_layers: int
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of every decoder. Names are those of Hugging Face's config.json.

    Raises:
      ValueError: values that make no model, or one that is not supported; one error lists all.
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
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
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
    """The fields that must be integers above zero."""
    supported: ClassVar[dict[str, tuple]] = {
        "pruned_heads": ({}, None),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
    }
    """Fields of config.json that are no fields here, and the values, the usual one first, with which they change nothing."""

    def __post_init__(self):
        problems = [f"{n}={v!r} must be a positive integer" for n in self.positive if not is_positive(v := getattr(self, n))]
        problems += wrong_types(self, but=self.positive)
        problems += [] if problems else self.rope_parameters.problems()
        problems = problems or self.problems()
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with the values, each as one clause."""
        problems = []
        if self.hidden_act != "silu":
            problems.append(f"hidden_act={self.hidden_act!r} is not supported (only 'silu')")
        if self.attention_dropout:
            problems.append(f"attention_dropout={self.attention_dropout} is not supported (only 0)")
        if self.rms_norm_eps < 0:
            problems.append(f"rms_norm_eps={self.rms_norm_eps} must be 0 or more")
        return problems

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head the rotary embedding turns."""
        raise NotImplementedError

    @property
    def key_dim(self) -> int:
        """The width of a query and of a key head, where attention meets them."""
        raise NotImplementedError

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        raise NotImplementedError

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what a layer's cache keeps of a token: its keys and its values."""
        heads = self.num_key_value_heads
        return (heads, self.key_dim), (heads, self.value_dim)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return ()

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens (a token sees itself and window - 1 before it); None: all."""
        return (None,) * self.num_hidden_layers

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers as runs of one kind, in order."""
        sparse_layers = frozenset(self.moe_layers)
        stages: list[Stage] = []
        for layer in range(self.num_hidden_layers):
            sparse = layer in sparse_layers
            if stages and stages[-1].sparse == sparse:
                stages[-1] = dataclasses.replace(stages[-1], num_layers=stages[-1].num_layers + 1)
            else:
                stages.append(Stage(layer, 1, sparse))
        return tuple(stages)

    @property
    def mtp_stages(self) -> tuple[Stage, ...]:
        """The layers of the modules that predict further tokens, behind the last one: a stage each (`models.mtp`)."""
        return ()

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts, those of such modules among them."""
        return (*self.moe_layers, *(stage.first_layer for stage in self.mtp_stages if stage.sparse))

    def without_mtp(self) -> Self:
        """This config without those modules."""
        return self

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Brings the fields of a config.json, which has several dialects, to this class's, in place; adds what is wrong."""
        for name, values in cls.supported.items():
            if (value := given.pop(name, None)) not in values:
                problems.append(f"{name}={json.dumps(value)} is not supported (only {json.dumps(values[0])})")
        if given.get("num_key_value_heads", 0) is None:
            given["num_key_value_heads"] = value_of(cls, given, "num_attention_heads")

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Brings this class's fields to the hub's dialect, in place."""


def value_of(cls: type[ModelConfig], given: dict[str, Any], name: str) -> Any:
    """The given value of a field, or its default."""
    return given.get(name, getattr(cls, name))


def rename(given: dict[str, Any], old: str, new: str, problems: list[str]) -> None:
    """Takes the field `old` for `new`, which must not say something else."""
    if old in given:
        value = given.pop(old)
        if given.setdefault(new, value) != value:
            problems.append(f"{old}={value} contradicts {new}={given[new]}")


def is_positive(value: Any) -> bool:
    """Whether it is an integer above zero."""
    return _is_of(value, int) and value > 0


def wrong_types(fields: Any, but: tuple[str, ...] = ()) -> list[str]:
    """The fields of a dataclass, all `but` these, whose values are not of the annotated type, each as one clause."""
    hints = get_type_hints(type(fields))
    given = {item.name: getattr(fields, item.name) for item in dataclasses.fields(fields) if item.name not in but}
    return [f"{name}={value!r} must be {_name(hints[name])}" for name, value in given.items() if not _is_of(value, hints[name])]


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value of a config is of the annotated type. Integers are numbers too, and a null flag is one not set."""
    if get_origin(kind) is UnionType:
        return any(_is_of(value, choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if kind is bool:
        return value is None or isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _name(kind: Any) -> str:
    """The type as config.json has it."""
    if get_origin(kind) is UnionType:
        return " or ".join(map(_name, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list (in Python a tuple), each entry {_name(get_args(kind)[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(kind, kind.__name__)
