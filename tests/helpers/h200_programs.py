"""Compiled programs for an H200 are kept from run to run: their text, their memory, and the compiler's remarks on the kernels.

JAX keeps no program of a compiler without its GPU. What is compiled from the same lowered program, with the same options and by
the same versions, is read instead.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax

KEPT = Path(__file__).parents[2] / ".cache" / "h200"
MAX_PROGRAMS = 500
"""Above this number all are deleted: programs of older sources are never read again."""

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-cuda13-pjrt", "jax-cuda12-pjrt", "nvidia-cuda-nvcc")

_last = ""
"""Key of the program compiled before. The compiler reports nothing about a kernel that the process has compiled already."""


def install() -> None:
    """Makes `compile` of lowered programs read what is kept, in this process."""
    compile_anew = jax.stages.Lowered.compile

    def compile_once(lowered, compiler_options=None):
        global _last
        _last = key(_last, lowered, compiler_options)
        file = KEPT / f"{_last}.json"
        if not file.exists():
            write(file, compiled(lambda: compile_anew(lowered, compiler_options)))
        kept = json.loads(file.read_text())
        sys.stdout.write(kept["said"])
        return SimpleNamespace(as_text=lambda: kept["text"], memory_analysis=lambda: SimpleNamespace(**kept["memory"]))

    jax.stages.Lowered.compile = compile_once


def key(before: str, lowered, compiler_options) -> str:
    """Returns a hash of all that the compiler's output depends on, names of scopes included."""
    program = lowered.compiler_ir().operation.get_asm(enable_debug_info=True)
    options = sorted((compiler_options or {}).items())
    flags = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("XLA_", "MOSAIC_"))]
    parts = [before, program, repr(options), *flags, *map(version, PACKAGES), Path(__file__).with_name("h200.py").read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def version(package: str) -> str:
    """Returns a package's version, or nothing if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compiled(compile_anew) -> dict:
    """Returns what is kept of a program. What libraries write to standard output during the compilation is caught."""
    sys.stdout.flush()
    screen = os.dup(1)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        try:
            program = compile_anew()
        finally:
            os.dup2(screen, 1)
            os.close(screen)
        said.seek(0)
        memory = program.memory_analysis()
        sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        return {"text": program.as_text(), "memory": sizes, "said": said.read().decode()}


def write(file: Path, kept: dict) -> None:
    """Writes a file that is complete or absent."""
    KEPT.mkdir(parents=True, exist_ok=True)
    others = list(KEPT.glob("*.json"))
    for other in others if len(others) > MAX_PROGRAMS else ():
        other.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=KEPT, delete=False) as part:
        json.dump(kept, part)
    os.replace(part.name, file)
