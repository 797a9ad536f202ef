"""Lazy exports: a package imports each public name on first use, so that `import moe_jax` is fast.

A package's `__init__.py` imports its exports in a block `if TYPE_CHECKING:`, for type checkers and editors. Then it calls
`export_lazily(__name__)`, which reads the same block and makes each import on first use (PEP 562).
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def export_lazily(package: str) -> None:
    """Makes each name that `package` imports under `if TYPE_CHECKING:` an attribute, imported on first use.

    If a function and a submodule have the same name (`recipes.finetune`), the attribute is always the function. `dir()` lists
    `__all__`.
    """
    module = sys.modules[package]
    module.__dict__["_exports"] = _type_checking_imports(Path(str(module.__file__)))
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    """A package whose `_exports` map each public name to its module."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        origin = self._exports[name]
        value = import_module(f"{origin}.{name}") if origin == self.__name__ else getattr(import_module(origin), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds each imported submodule to its package, and would replace a function of the same name.
        hides_export = isinstance(value, ModuleType) and self._exports.get(name, self.__name__) != self.__name__
        if not hides_export:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["__all__"])


def _type_checking_imports(file: Path) -> dict[str, str]:
    """Returns {name: its module} for the imports in the block `if TYPE_CHECKING:` of a file."""
    statements = ast.parse(file.read_text()).body
    blocks = (node.body for node in statements if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}
