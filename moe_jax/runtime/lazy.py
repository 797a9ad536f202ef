"""Packages that import a public name when it is first used: `import moe_jax` costs nothing until then.

A package's `__init__.py` names its exports in a block `if TYPE_CHECKING:`, which type checkers and editors read, and calls
`export_lazily(__name__)`, which reads the same block and makes each import on first use (PEP 562).
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def export_lazily(package: str) -> None:
    """Makes the names that `package` imports under `if TYPE_CHECKING:` its attributes, each imported on first use.

    A name that is a function and also the submodule that defines it (`recipes.finetune`) is the function, whatever was
    imported before; `dir()` lists `__all__`.
    """
    module = sys.modules[package]
    module.__dict__["_exports"] = _type_checking_imports(Path(str(module.__file__)))
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    """A package whose `_exports` say where each public name comes from."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        origin = self._exports[name]
        value = import_module(f"{origin}.{name}") if origin == self.__name__ else getattr(import_module(origin), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds each imported submodule to its package, also over a function of the same name.
        hides_export = isinstance(value, ModuleType) and self._exports.get(name, self.__name__) != self.__name__
        if not hides_export:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["__all__"])


def _type_checking_imports(file: Path) -> dict[str, str]:
    """{name: the module that it is imported from} for the block `if TYPE_CHECKING:` of a file."""
    statements = ast.parse(file.read_text()).body
    blocks = (node.body for node in statements if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}
