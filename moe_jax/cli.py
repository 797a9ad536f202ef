"""The program `moe-jax`: reads which command is asked for, and runs it where its devices and processes allow it."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import tyro

from moe_jax.commands.check import Check
from moe_jax.commands.convert import Convert
from moe_jax.commands.generate import Generate
from moe_jax.commands.plan import Plan
from moe_jax.commands.plot import Plot
from moe_jax.commands.tune import Tune
from moe_jax.demo import DemoSettings, run_demo
from moe_jax.launch import LaunchSettings, launch
from moe_jax.parallel import environment, processes
from moe_jax.train import FinetuneSettings, dry_run, finetune
from moe_jax.train.lock import output_lock
from moe_jax.train.settings_file import chosen_template


def main(arguments: list[str] | None = None) -> None:
    """Runs one command. Bad input ends with one line on standard error and exit status 2."""
    # Before JAX starts.
    environment.set_defaults(os.environ)

    commands: dict[str, Any] = {
        "convert": Convert,
        "finetune": FinetuneSettings,
        "plot": Plot,
        "plan": Plan,
        "launch": LaunchSettings,
        "generate": Generate,
        "check": Check,
        "demo": DemoSettings,
        "tune": Tune,
    }
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands, prog="moe-jax", description="Mixture-of-Experts language models in JAX.", args=arguments
        )
        if isinstance(command, LaunchSettings):
            if status := launch(command):
                raise SystemExit(status)
            return
        processes.initialize_processes()
        several = jax.distributed.is_initialized()
        if not (several or _takes_several_devices(command)):
            processes.use_one_gpu()
        if isinstance(command, FinetuneSettings):
            _finetune(command)
        elif several and not isinstance(command, Generate | Check):
            raise ValueError("only finetune, generate and check run in several processes; start this command once")
        elif isinstance(command, DemoSettings):
            run_demo(command)
        else:
            command.run()
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        processes.leave(2)
    except KeyboardInterrupt:
        print("moe-jax: interrupted", file=sys.stderr)
        processes.leave(128 + signal.SIGINT)


def _takes_several_devices(command: Any) -> bool:
    """By --devices of generate and check, or finetune's mesh."""
    if isinstance(command, Generate | Check):
        return command.devices is not None and command.devices > 1
    return hasattr(command, "mesh") and command.mesh.size > 1


def _finetune(settings: Any) -> None:
    """Trains and exports, or rehearses. A run that was told to stop ends with status 143, as a program that SIGTERM ended."""
    if settings.dry_run:
        dry_run(settings)
        return
    result = finetune(settings)
    first = processes.is_first_process()
    if not result.finished:
        if first:
            print(f"stopped after step {result.step} and saved; the same command goes on from there", flush=True)
        processes.leave(143)
    folder = Path(settings.output).expanduser() / "model"
    template = None if settings.chat_template is None else chosen_template(folder.parent)
    with output_lock(folder.parent):
        result.model.save_pretrained(folder, tokenizer_from=settings.tokenizer, chat_template=template)
    if first:
        print(f"trained to step {result.step}; Hugging Face checkpoint in {folder}")


if __name__ == "__main__":
    main()
