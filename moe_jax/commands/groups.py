"""Commands that run a recipe: their options are the fields of its settings, in groups. Each group is a box in the help."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from moe_jax.commands.config_file import CONFIG_FIELD

Groups = Mapping[str, Sequence[str]]
"""The names of fields by the title of their group."""


def recipe_command(settings: type, groups: Groups, others: Mapping[str, tuple[Any, Any]], run: Callable[[Any], None]) -> Any:
    """Builds the command-line class of a recipe, with options from the fields of `settings` and `--config`.

    Its property `settings` returns the settings that were given, or raises their ValueError.

    Args:
      others: {field: (type, default)} of fields that are in no group.
    """

    def given(command: Any) -> Any:
        in_groups = (vars(getattr(command, _attribute(title))) for title in groups)
        values = {name: value for group in in_groups for name, value in group.items()}
        return settings(**values, **{name: getattr(command, name) for name in others})

    members: list[Any] = [(_attribute(title), _group(settings, title, names)) for title, names in groups.items()]
    members += [CONFIG_FIELD, *((name, kind, field(default=default)) for name, (kind, default) in others.items())]
    namespace = {"run": run, "settings": property(given)}
    command = make_dataclass(settings.__name__.replace("Settings", "Command"), members, frozen=True, namespace=namespace)
    command.__doc__ = str(settings.__doc__).partition("The settings of")[0].rstrip()
    return command


def train_and_report(settings: Any, recipe: Callable[[Any], Any]) -> None:
    """Runs a recipe: trains, exports the model or adapter, writes the report, and prints their paths.

    A run that a signal stopped exits with status 143, the status of a program that SIGTERM ended.
    """
    import jax

    from moe_jax.recipes import write_report
    from moe_jax.recipes.run.best import told_end, told_stop
    from moe_jax.recipes.run.folder import export
    from moe_jax.runtime import processes

    result, is_first = recipe(settings), processes.is_first_process()
    if not result.finished:
        if is_first:
            print(told_stop("stopped", result.step), flush=True)
        processes.leave(143)
    folder = export(result.model, settings)
    if is_first:
        what = "Hugging Face checkpoint" if settings.lora is None else "adapter, for PEFT too,"
        print(f"{told_end(settings, result.step, result.model_step, result.stopped_early)}{what} in {folder}")
        kinds = f"{settings.mesh.size} x {jax.devices()[0].device_kind}"
        print(f"report in {write_report(settings.output, model_step=result.model_step, devices=kinds)}")


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
