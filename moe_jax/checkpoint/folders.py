"""Replaces a whole folder so that a crash at any moment leaves either the old folder or the new one complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from moe_jax.runtime.processes import barrier, is_first_process

MODEL_FILES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin",
    "pytorch_model*.bin.index.json", "params",
)  # fmt: skip
"""The files of a model's checkpoint, in any format: a save removes all old ones."""


@contextmanager
def replaced_folder(
    folder: str | Path, replaces: tuple[str, ...] = MODEL_FILES, *, marker: str = "config.json"
) -> Iterator[Path]:
    """Context manager: yields an empty folder `.NAME.incomplete` next to `folder`, and replaces `folder` by it at the end.

    Until then `folder` is untouched; on an exception the incomplete folder is removed. The swap is two renames. If the machine
    dies between them, the complete old folder is in `.NAME.previous`, and the next save restores it first. Entries of the old
    folder that match no pattern in `replaces` stay: they are hard-linked into the new folder. All processes of a job call this
    together on a shared file system; the first process makes and swaps the folders.

    Raises:
      FileExistsError: `folder` is a file, or is not empty and has no `marker` file: it is not a checkpoint, and replacing it
        would lose somebody's files.
      ValueError: `folder` is a mount point, which cannot be renamed, or it is the current directory or holds it.
    """
    folder = Path(folder).expanduser().resolve()
    incomplete = folder.with_name(f".{folder.name}.incomplete")
    previous = previous_of(folder)
    check_replaceable(folder, marker)
    first = is_first_process()
    if first:
        if previous.is_dir():
            _finish(folder, previous)
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
    barrier("folder made")
    try:
        yield incomplete
        barrier("folder written")
        if first:
            _swap(folder, incomplete, previous, replaces)
    except BaseException:
        if first:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise
    barrier("folder swapped")


def check_replaceable(folder: str | Path, marker: str = "config.json") -> None:
    """Raises, before hours of work, the errors that `replaced_folder` would raise for `folder`."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a checkpoint is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise FileExistsError(
            f"{folder} has files but no {marker}, so it is not a checkpoint to replace: move it away, or give another folder"
        )
    if os.path.ismount(folder):
        raise ValueError(f"{folder} is a mount point, which another folder cannot replace: give a folder in it")
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"{folder} is the current directory or holds it, and a save replaces it: give another folder")


def previous_of(folder: Path) -> Path:
    """Returns the path where the old folder is kept while it is being replaced."""
    return folder.with_name(f".{folder.name}.previous")


def _swap(folder: Path, incomplete: Path, previous: Path, replaces: tuple[str, ...]) -> None:
    if folder.is_dir():
        for entry in folder.iterdir():
            ours = any(fnmatch(entry.name, pattern) for pattern in replaces)
            if not ours and not (incomplete / entry.name).exists():
                _link(entry, incomplete / entry.name)
    for directory, _, files in os.walk(incomplete):
        for name in files:
            _sync(os.path.join(directory, name))
        _sync(directory)
    if folder.is_dir():
        folder.rename(previous)
    try:
        incomplete.rename(folder)
    except BaseException:
        if previous.is_dir():
            previous.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _finish(folder: Path, previous: Path) -> None:
    """Completes a swap that a crash interrupted: removes the old folder if there is a new one, else restores it."""
    if folder.exists():
        shutil.rmtree(previous)
    else:
        previous.rename(folder)


def _link(source: Path, target: Path) -> None:
    """Gives a file or folder tree a second name, without a copy of its contents if the file system can."""

    def link(a: str, b: str) -> None:
        try:
            os.link(a, b, follow_symlinks=False)
        except OSError:
            shutil.copy2(a, b, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))


def _sync(path: str | Path) -> None:
    """Waits until the file or folder is on disk."""
    if os.path.islink(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
