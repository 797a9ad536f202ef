"""Rules of the whole repository: which way imports go, that torch stays optional, that every file says what it is about."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moe_jax"
LAYERS = [
    {"lazy", "messages"},
    {"kernels"},
    {"parallel"},
    {"config"},
    {"layers"},
    {"models"},
    {"flops", "checkpoint"},
    {"generation"},
    {"train", "cost"},
    {"plots"},
    {"demo_text"},
    {"passes", "tile_timing"},
    {"check", "demo", "launch", "plan", "tune"},
    {"slurm"},
    {"commands"},
    {"cli"},
]
"""The parts of the package from the bottom up: a part imports parts below it and itself, never one above or beside it."""

ALLOWED_UPWARDS = {("models", "moe_jax.checkpoint.hf_save.save_pretrained"), ("cli", "moe_jax.__version__")}
"""`model.save_pretrained(folder)` is a method because users of transformers look for it there; it imports when called.
`moe-jax --version` prints the package's own version."""

SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = SOURCES + sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def test_the_parts_of_the_package_are_all_listed():
    parts = {part_of(path) for path in SOURCES} - {"__init__"}
    assert parts <= set().union(*LAYERS), "a part of moe_jax is missing in LAYERS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = part_of(path)
    if part == "__init__":
        return
    wrong = [f"line {line}: {name}" for line, name in imported_names(path, everywhere=True) if not allowed(part, name)]
    assert not wrong, f"{path.relative_to(ROOT)} ({part}) imports from above or beside itself: {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_imported_nowhere_at_module_level(path):
    wrong = [line for line, name in imported_names(path, everywhere=False) if name.split(".")[0] == "torch"]
    assert not wrong, f"{path.relative_to(ROOT)} imports torch at lines {wrong}: import it inside the function that needs it"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_about(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and docstring.splitlines()[0].strip(), f"{path.relative_to(ROOT)} has no module docstring"


def test_the_import_rule_itself(tmp_path):
    source = "import torch.nn\nfrom moe_jax import cli\ndef f():\n    from moe_jax.models.auto import x\n"
    (tmp_path / "a.py").write_text(source)
    everywhere = [name for _, name in imported_names(tmp_path / "a.py", everywhere=True)]
    assert everywhere == ["torch.nn", "moe_jax.cli", "moe_jax.models.auto.x"]
    assert [name for _, name in imported_names(tmp_path / "a.py", everywhere=False)] == everywhere[:2]
    assert allowed("models", "moe_jax.layers.router.route") and allowed("models", "moe_jax.models.output.ModelOutput")
    assert not allowed("layers", "moe_jax.models.auto.x") and not allowed("kernels", "moe_jax.parallel")
    assert not allowed("checkpoint", "moe_jax.generation.generate") and not allowed("layers", "moe_jax.from_config")
    assert allowed("kernels", "numpy.random")


def part_of(path: Path) -> str:
    """`kernels` for moe_jax/kernels/routing.py, `config` for moe_jax/config.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path, *, everywhere: bool) -> Iterator[tuple[int, str]]:
    """(line, full name) of each import; without `everywhere` those alone that run when the module is imported."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def allowed(part: str, name: str) -> bool:
    """Whether a file of `part` may import `name`."""
    words = name.split(".")
    if words[0] != "moe_jax" or (part, name) in ALLOWED_UPWARDS:
        return True
    level = next(index for index, parts in enumerate(LAYERS) if part in parts)
    below = set().union(*LAYERS[:level]) | {part}
    return len(words) > 1 and words[1] in below
