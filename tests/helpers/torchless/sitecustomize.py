"""Hides torch from a process that finds this folder on PYTHONPATH."""

import sys
from importlib.machinery import PathFinder


class TorchlessFinder(PathFinder):
    """Python's finder of modules, but for torch."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = TorchlessFinder
