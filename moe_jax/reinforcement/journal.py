"""The journal of a run: every scored group on disk, so that a killed run neither draws nor scores it again.

A step is a folder with one file, `groups.jsonl`. A group is one line: a checksum, and the group as JSON. Each line is on the
disk before `append` returns. Only the last line can be torn by a kill; it is dropped, and its group is drawn again.
"""

from pathlib import Path

from moe_jax.reinforcement.samples import Group


class Journal:
    """Groups of a run, by step and key.

    Args:
      folder: the journal's folder; it is made with the first group.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()

    def append(self, step: int, group: Group) -> None:
        """Writes a group, and returns when it is on the disk. The experts of its samples are not stored."""
        raise NotImplementedError

    def groups(self, step: int) -> dict[int, Group]:
        """Returns the whole groups of a step, by key; empty for a step without any.

        Raises:
          ValueError: a line before the last one is damaged; the message names file and line.
        """
        raise NotImplementedError

    def drop(self, *, before: int) -> None:
        """Removes all steps before a step, which a complete checkpoint has made unnecessary."""
        raise NotImplementedError
