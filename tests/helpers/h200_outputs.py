"""Outputs of scripts for an H200 are kept from run to run, until a file changes that the script read.

Once the programs are kept (`h200_programs`), imports, tracing and lowering are nearly all of a script's time.
An output is read again if the script, the flags, the packages' versions and all files that its process imported are the same.
"""

import atexit
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.helpers.h200_programs import KEPT, PACKAGES, version, write

ROOT = Path(__file__).parents[2]

LIST = "MOE_JAX_IMPORTED_FILES"
"""Environment variable with the file in which a script's process lists the files that it read."""

FLAGS = ("JAX_", "XLA_", "MOSAIC_")


def output_of(command: list[str], environment: dict[str, str], compiler: Path, run: Callable[[dict[str, str]], str]) -> str:
    """Returns run(environment of the script), or its earlier result for the same inputs."""
    file = KEPT / f"output-{key(command, environment, compiler)}.json"
    kept = json.loads(file.read_text()) if file.exists() else None
    if kept and all(digest(name) == before for name, before in kept["files"].items()):
        return kept["output"]
    with tempfile.NamedTemporaryFile("r") as names:
        output = run(environment | {LIST: names.name})
        files = names.read().splitlines()
    assert files, "the script did not list the files that it read"
    write(file, {"files": {name: digest(name) for name in files}, "output": output})
    return output


def key(command: list[str], environment: dict[str, str], compiler: Path) -> str:
    """Returns a hash of all but files that a script's output depends on. The compiler may have a folder of its own."""
    flags = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(FLAGS) and "CACHE" not in name]
    versions = [sys.version, *map(version, (*PACKAGES, "flax", "numpy")), *sorted(p.name for p in compiler.glob("*.dist-info"))]
    return hashlib.sha256("\0".join([*command, *flags, *versions]).encode()).hexdigest()


def digest(name: str) -> str:
    """Returns a hash of a file, or nothing if it is gone."""
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def list_files_at_exit() -> None:
    """Makes this process, a script's, list the files that it read when it ends."""
    atexit.register(lambda: Path(os.environ[LIST]).write_text("\n".join(files_read())))


def files_read() -> list[str]:
    """Returns the files of the package and of the tests that this process imported, and the package's tables."""
    rooms = ROOT / "moe_jax", ROOT / "tests"
    imported = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    tables = rooms[0].rglob("*.json")
    return sorted({str(file) for file in (*imported, *tables) if any(file.is_relative_to(room) for room in rooms)})
