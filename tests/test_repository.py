"""Rules of the whole repository: the imports of rooms, torch stays optional, every file states its subject."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from tests.helpers import house_rules

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moe_jax"
MAY_IMPORT = {
    "runtime": set(),
    "pages": set(),
    "config": {"runtime"},
    "kernels": {"runtime"},
    "layers": {"runtime", "config", "kernels"},
    "parallel": {"runtime", "kernels", "layers"},
    "experimental": {"runtime", "config", "kernels", "parallel", "layers"},
    "models": {"runtime", "config", "kernels", "parallel", "layers"},
    "checkpoint": {"runtime", "config", "parallel", "layers", "models"},
    "adapters": {"runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint"},
    "cost": {"runtime", "config", "kernels", "parallel", "layers", "models"},
    "generation": {"runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint"},
    "serving": {
        "runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint", "adapters", "generation", "pages",
        "__version__",
    },
    "train": {"runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint", "adapters", "cost"},
    "preferences": {"runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint", "adapters", "train"},
    "reinforcement": {
        "runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint", "adapters", "generation", "serving",
        "train", "preferences",
    },
    "check": {"runtime", "config", "kernels", "parallel", "layers", "models", "checkpoint", "cost", "generation"},
    "recipes": {
        "runtime", "config", "parallel", "models", "checkpoint", "adapters", "cost", "generation", "serving", "train",
        "preferences", "reinforcement",
    },
    "demo": {"runtime", "config", "parallel", "models", "checkpoint", "adapters", "generation", "train", "recipes"},
    "commands": {
        "runtime", "config", "kernels", "parallel", "models", "checkpoint", "adapters", "cost", "generation", "serving",
        "train", "preferences", "reinforcement", "check", "recipes", "demo", "pages",
    },
    "cli": {"runtime", "commands", "__version__"},
}  # fmt: skip
"""The rooms of the package, the lowest first, and what each may import in addition to itself and third-party packages.

`kernels` knows no Flax, no mesh and no config; `layers` knows no mesh; `parallel` knows no model; nothing imports
`experimental`. Every room may use `runtime`, which gives packages their lazy exports.
"""

MAX_VARIABLES = 10

UNSEEDED = r"default_rng\(\)|\bsecrets\.|np\.random\.(rand|choice|normal|perm|shuffle)"

SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = SOURCES + sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def test_the_root_holds_the_face_and_the_program_alone():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "cli.py"}


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in SOURCES} - {"__init__"} == set(MAY_IMPORT)


def test_the_table_has_no_circle():
    rooms = list(TopologicalSorter({room: others & MAY_IMPORT.keys() for room, others in MAY_IMPORT.items()}).static_order())
    assert set(rooms) == set(MAY_IMPORT)
    for i, (room, others) in enumerate(MAY_IMPORT.items()):
        assert others - {"__version__"} <= set(list(MAY_IMPORT)[:i]), f"{room} stands in the table before a room it imports"


def test_imports_keep_to_the_table():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in imported_names(path, everywhere=True)
        if room_of(path) != "__init__" and not allowed(room_of(path), name)
    ]
    assert not wrong, "imports that MAY_IMPORT does not list:\n" + "\n".join(wrong)


def test_no_two_files_import_each_other():
    modules = {module_of(path): path for path in SOURCES}
    graph = {}
    for module, path in modules.items():
        names = (name for _, name in imported_names(path, everywhere=True) if path.name != "__init__.py")
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (found & modules.keys()) - {module}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "module, files",
    [("layers.moe", 45), ("layers.router", 25), ("kernels.experts.api", 25), ("layers.linear", 10)],
)
def test_the_ground_imports_few_files(module, files):
    """A layer loads only its own operations, and neither meshes nor backends; these are imported where they are chosen."""
    found = loaded_by(f"moe_jax.{module}")
    assert len(found) <= files, f"import moe_jax.{module} loads {sorted(found)}"


def test_experts_have_two_doors():
    doors = {name for name in functions_of_package() if name.startswith("experts_mlp")}
    assert len(doors) <= 2, sorted(doors)


def test_only_configs_and_models_know_architectures():
    asks = re.compile(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*Config\b")
    found = {str(path.relative_to(ROOT)): len(asks.findall(path.read_text())) for path in SOURCES}
    assert not {path for path, times in found.items() if times and room_of(ROOT / path) not in ("config", "models")}


def test_kinds_of_variables_are_few():
    """Every kind is one more that each split of a model has to name."""
    kinds = {
        node.name
        for path in SOURCES
        for node in house_rules.parsed(path).body
        if isinstance(node, ast.ClassDef) and "nnx.Variable" in map(ast.unparse, node.bases)
    }
    assert len(kinds) <= MAX_VARIABLES, sorted(kinds)


def test_optional_packages_are_never_imported_at_module_level():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line, name in imported_names(path, everywhere=False)
        if name.split(".")[0] in ("torch", "datasets")
    ]
    assert not wrong, f"torch and datasets are optional: import them inside the function that needs them, not at {wrong}"


def test_chat_templates_need_no_extra():
    """transformers renders them with jinja2, and does not install it; torch does, which is optional."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("jinja2") for each in project["dependencies"])


def test_the_extra_all_holds_every_package_that_users_may_want():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("moe_jax[").removesuffix("]").split(","))
    assert named == extras.keys() - {"all", "cuda12", "cuda13", "test", "docs", "dev"}


def test_the_workflow_of_public_hosts_runs_what_ci_runs():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands["test"] == [".ci/run"] and commands["package"][0].startswith("make dist")


def test_every_file_says_what_it_is_about():
    wrong = [
        str(path.relative_to(ROOT)) for path in ALL_PYTHON if not (ast.get_docstring(house_rules.parsed(path)) or "").strip()
    ]
    assert not wrong, f"files without a module docstring: {wrong}"


def test_house_rules():
    """Nothing in the repository breaks a rule that tests/helpers/house_rules.py defines."""
    for rule, found in house_rules.offenders().items():
        assert not found, f"these break the rule on {rule} (tests/helpers/house_rules.py): {found}"


def test_reasons_are_of_functions_that_need_one():
    many = {
        name
        for path in SOURCES
        for name, node in house_rules.public(path)
        if isinstance(node, ast.FunctionDef) and house_rules.num_parameters(node) > house_rules.MAX_PARAMETERS
    }
    assert house_rules.MANY_PARAMETERS.keys() <= many


def test_the_house_rules_themselves():
    function = ast.parse("def f(self, a, b, /, c, *args, d, **options): pass").body[0]
    assert house_rules.num_parameters(function) == 6
    assert house_rules.first_word("`Of` what") == "Of" and house_rules.first_word('"Splits" it') == "Splits"
    text = """Returns one `a b c d` of two (e.g. three).

    Args:
        x: four words are here. Five words are right here.

    - an item

        a formula = of + more * words / than - all / others
    """
    docstring = ast.get_docstring(ast.parse(f"def f():\n    '''{text}'''").body[0])
    assert house_rules.longest_sentence(docstring) == 7
    assert house_rules.longest_sentence(" ".join(["word"] * 26) + ". One.") == 26


def test_random_numbers_are_seeded():
    others = [path for path in house_rules.sources("tests") if path.name != "seeds.py"]
    wrong = [str(path.relative_to(ROOT)) for path in others if re.search(UNSEEDED, path.read_text())]
    assert not wrong, f"`seeds.rng()` can be repeated, these generators can not: {wrong}"


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


def room_of(path: Path) -> str:
    """`kernels` for moe_jax/kernels/experts/routing.py, `cli` for moe_jax/cli.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """`moe_jax.train.loss` for moe_jax/train/loss.py; a package for its __init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(module: str) -> set[str]:
    """Returns the package's modules that an import of `module` loads; exports of packages are lazy."""
    sources = {module_of(path): path for path in SOURCES}
    loaded, pending = set(), [module]
    while pending:
        name = pending.pop()
        name = name if name in sources else name.rpartition(".")[0]
        if name in loaded or name not in sources:
            continue
        loaded.add(name)
        pending.append(name.rpartition(".")[0])
        if sources[name].name != "__init__.py" or ".lazy" not in sources[name].read_text():
            pending.extend(other for _, other in imported_names(sources[name], everywhere=False))
        else:
            pending.append("moe_jax.runtime.lazy")
    return loaded


def functions_of_package() -> set[str]:
    """Returns the names of all functions and methods."""
    nodes = (node for path in SOURCES for node in ast.walk(house_rules.parsed(path)))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def imported_names(path: Path, *, everywhere: bool) -> Iterator[tuple[int, str]]:
    """(line, full name) of each import; without `everywhere` only imports that run when the module is imported."""
    pending: list[ast.AST] = [house_rules.parsed(path)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def allowed(room: str, name: str) -> bool:
    """Returns whether a file of `room` may import `name`."""
    words = name.split(".")
    if words[0] != "moe_jax":
        return True
    return len(words) > 1 and words[1] in MAY_IMPORT[room] | {room}
