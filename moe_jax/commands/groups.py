"""A command whose options are the fields of a settings class, in groups: tyro shows each group as one box of the help."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

Groups = Mapping[str, Sequence[str]]
"""The names of fields by the title of their group."""


def grouped_fields(settings: type, groups: Groups) -> list[tuple[str, Any]]:
    """Returns a member for each group, as `dataclasses.make_dataclass` takes it: a dataclass of the group's fields."""
    return [(_attribute(title), _group(settings, title, names)) for title, names in groups.items()]


def values_in(command: Any, groups: Groups) -> dict[str, Any]:
    """Returns the values of all grouped fields of a command, by name."""
    return {name: value for title in groups for name, value in vars(getattr(command, _attribute(title))).items()}


def summary_of(settings: type) -> str:
    """Returns the settings' docstring up to the sentence about the settings themselves: the command's description."""
    return str(settings.__doc__).partition("The settings of")[0].rstrip()


def _group(settings: type, title: str, names: Sequence[str]) -> Any:
    defaults, hints = {each.name: each.default for each in fields(settings)}, get_type_hints(settings)
    members: list[Any] = [
        (name, hints[name]) if defaults[name] is MISSING else (name, hints[name], field(default=defaults[name]))
        for name in names
    ]
    group = make_dataclass(settings.__name__ + title.title().replace(" ", ""), members, frozen=True)
    # Only the options' descriptions: the class's own would be repeated in every box.
    documented = [str(each.__doc__).partition("Attributes:")[2].rstrip() for each in settings.__mro__ if is_dataclass(each)]
    group.__doc__ = "\n    Attributes:" + "".join(documented)
    return Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)]


def _attribute(title: str) -> str:
    return title.replace(" ", "_") + "_"
