"""The program `moe-jax`: parses the command line and runs one command.

Only the module of that command is imported, and JAX only when the command runs, so that help is immediate.
"""

import difflib
import os
import select
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moe_jax import __version__
from moe_jax.commands.other_names import refuse_other_names, with_draft_source
from moe_jax.runtime import environment


@dataclass(frozen=True)
class Command:
    """A command of the program: the name of its class in `moe_jax.commands`, and a line of help."""

    class_name: str
    summary: str
    several_processes: bool = False
    """True if the command can run as several processes of one job."""
    several_devices: bool = False
    """True if one process can compute on --devices devices. True for every command with `several_processes`."""
    uses_jax: bool = True
    """False if the command runs without JAX, and JAX is not imported for it."""


COMMANDS = {
    "Train": {
        "finetune": Command("FinetuneCommand", "train a model on texts or chats, and export it", several_processes=True),
        "prefer": Command("PreferCommand", "train a model on preferences: DPO, ORPO, KTO, SimPO", several_processes=True),
        "grpo": Command("GrpoCommand", "train a model by rewards of its own answers: GRPO, DAPO, GSPO and others"),
        "demo": Command("DemoCommand", "train, resume, export and sample a small model here, in 5 minutes on a CPU"),
        "data": Command(
            "DataCommand", "show what a model would learn from data, and count tokens; needs no GPU", uses_jax=False
        ),
        "plan": Command("PlanCommand", "predict time and memory of a training step for every mesh; needs no GPU"),
        "launch": Command("LaunchCommand", "start a program once for each GPU of this host, as one job", uses_jax=False),
    },
    "Use": {
        "generate": Command("GenerateCommand", "continue a prompt, or answer it", several_processes=True),
        "chat": Command("ChatCommand", "talk with a model in the terminal"),
        "serve": Command("ServeCommand", "answer requests over HTTP, many at once, with OpenAI's API", several_devices=True),
        "bench": Command(
            "BenchCommand", "measure how fast a model is served: tokens a second, TTFT, TPOT", several_devices=True
        ),
        "card": Command("CardCommand", "write the model card of a run, for the Hugging Face hub"),
        "push": Command("PushCommand", "upload a run's model or adapter to the Hugging Face hub, with its card"),
        "convert": Command("ConvertCommand", "convert a checkpoint between Hugging Face's layout and Orbax"),
    },
    "Look": {
        "watch": Command("WatchCommand", "follow a training run in the browser", uses_jax=False),
        "plot": Command("PlotCommand", "draw a training run: its loss, and the load of its experts"),
        "schedule": Command("ScheduleCommand", "draw a pipeline schedule, and count its bubble; needs no GPU", uses_jax=False),
        "check": Command("CheckCommand", "time one forward and one backward pass of a model", several_processes=True),
        "tune": Command("TuneCommand", "find the fastest tiles of the Hopper kernels for a model's experts"),
    },
}
"""Commands by task. Each has a module of its name in `moe_jax.commands`."""

BY_NAME = {name: command for group in COMMANDS.values() for name, command in group.items()}

RECIPES = ("finetune", "prefer", "grpo")
"""Commands whose options are settings, which have `--config` and are checked before JAX starts."""

BROKEN_PIPE = 128 + 13
"""Exit status of a program killed by SIGPIPE."""


def main(arguments: list[str] | None = None) -> None:
    """Runs one command. Bad input ends with one line on standard error and exit status 2."""
    # JAX reads these variables when it starts.
    environment.set_defaults(os.environ)
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            _leave(BROKEN_PIPE)
        print(f"moe-jax: {error}", file=sys.stderr)
        _leave(2)
    except KeyboardInterrupt as error:
        print(f"moe-jax: {str(error) or 'interrupted'}", file=sys.stderr)
        _leave(128 + signal.SIGINT)


def top_help() -> str:
    """Returns the page of `moe-jax --help`."""
    lines = ["usage: moe-jax COMMAND [OPTIONS]      Mixture-of-Experts language models in JAX"]
    for task, commands in COMMANDS.items():
        lines += ["", f"{task}:", *(f"  {name:<10}{command.summary}" for name, command in commands.items())]
    return "\n".join([
        *lines,
        "moe-jax COMMAND --help lists its options; --version; --tyro-print-completion bash (or zsh, tcsh) for your shell.",
    ])  # fmt: skip


def _run(arguments: list[str]) -> None:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(top_help())
    elif name == "--version":
        print(f"moe-jax {__version__}")
    elif name.startswith("--tyro-print-completion"):
        _print_completion(arguments)
    elif name not in BY_NAME:
        raise ValueError(_no_command(name))
    else:
        _run_command(name, rest)


def _run_command(name: str, arguments: list[str]) -> None:
    if name not in RECIPES:
        _parse_and_run(name, arguments)
        return
    from moe_jax.commands.config_file import in_options, with_config

    arguments = with_config(name, arguments)
    try:
        _parse_and_run(name, arguments)
    except ValueError as error:
        if type(error) is ValueError:
            error.args = (in_options(name, str(error)),)
        raise


def _parse_and_run(name: str, arguments: list[str]) -> None:
    import tyro

    refuse_other_names(name, arguments)
    command: Any = tyro.cli(_command_class(name), prog=f"moe-jax {name}", args=with_draft_source(arguments))
    if not BY_NAME[name].uses_jax:
        command.run()
        return
    if name in RECIPES:
        # Checks the values before JAX starts.
        command.settings  # noqa: B018
    import jax

    from moe_jax.runtime import processes

    processes.initialize_processes()
    several, may_be_several = jax.distributed.is_initialized(), BY_NAME[name].several_processes
    if not several and _num_devices(name, command) <= 1:
        processes.use_one_gpu()
    if not several:
        processes.keep_programs()
    if several and not may_be_several:
        raise ValueError("only finetune, prefer, generate and check run in several processes; start this command once")
    command.run()


def _command_class(name: str) -> Any:
    return getattr(import_module(f"moe_jax.commands.{name}"), BY_NAME[name].class_name)


def _num_devices(name: str, command: Any) -> int:
    """Returns the devices that a command computes on: the size of its mesh, or --devices of each replica; else 1."""
    if hasattr(command, "mesh"):
        return command.mesh.size
    takes_devices = BY_NAME[name].several_devices or BY_NAME[name].several_processes
    replicas = command.sizes.replicas if hasattr(command, "sizes") else 1
    return replicas * (command.devices or 1) if takes_devices else 1


def _no_command(name: str) -> str:
    if not name:
        return "no command given; moe-jax --help lists them"
    near = difflib.get_close_matches(name, BY_NAME, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"no command {name!r}; {meant}moe-jax --help lists them"


def _print_completion(arguments: list[str]) -> None:
    """Prints the completion script of all commands, and imports each of them for it."""
    import tyro

    commands = {name: _command_class(name) for name in BY_NAME}
    tyro.extras.subcommand_cli_from_dict(commands, prog="moe-jax", args=arguments)


def _reader_is_gone() -> bool:
    """Returns True if standard output is a pipe without a reader (`| head`).

    Then output is discarded from here on: else Python's own flush at exit would fail again.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    # poll reports closed readers even if no event is requested.
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _leave(status: int) -> None:
    """Exits with `status`; through `processes.leave` if JAX is imported."""
    if "jax" in sys.modules:
        from moe_jax.runtime import processes

        processes.leave(status)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
