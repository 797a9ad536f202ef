"""Rules for signatures, docstrings and names, read from the sources without importing them."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers import prose

ROOT = Path(__file__).parents[2]

MAX_PARAMETERS = 8
MAX_CALL_PARAMETERS = 4
MAX_WORDS = 25
MAX_TEST_NAME = 60
FIRST_WORDS = {"What", "Which", "Whether", "Where", "How", "Of", "As", "Those", "Whose", "That"}
"""Words that no docstring begins with: it begins with a verb in the third person or the noun that it defines."""

_SAMPLING = "users give each option of sampling by its name, as in transformers"
_MODULE = "sizes and options of a module's weights, given once by name"
MANY_PARAMETERS = {
    "moe_jax/adapters/load.py:from_pretrained": "one call loads a model in every form, as in transformers",
    "moe_jax/commands/options.py:lora_of_options": "one for each option of adapters",
    "moe_jax/generation/generate.py:generate": _SAMPLING,
    "moe_jax/generation/speculative.py:generate_with_drafts": _SAMPLING,
    "moe_jax/generation/text.py:chat": _SAMPLING,
    "moe_jax/kernels/attention/api.py:attention": "three arrays, and masks by name as in jax.nn.dot_product_attention",
    "moe_jax/kernels/attention/paged/api.py:paged_attention": "as attention, and the pages",
    "moe_jax/layers/moe.py:Experts.__init__": _MODULE,
    "moe_jax/layers/moe.py:MoE.__init__": _MODULE,
    "moe_jax/kernels/experts/api.py:experts_mlp": "tokens, both matrices, biases, choices, and how experts multiply",
    "moe_jax/parallel/expert/mlp.py:expert_parallel_mlp": "the arguments of experts_mlp, and how the experts are spread",
}
"""Public functions that may have more than `MAX_PARAMETERS`, as `moe_jax/file.py:function`, and why each needs them."""

SECTIONS = {"Args:", "Returns:", "Raises:", "Yields:", "References:"}


class Documented(NamedTuple):
    """A public module, class or function."""

    name: str
    node: ast.Module | ast.ClassDef | ast.FunctionDef


@functools.cache
def offenders() -> dict[str, list[str]]:
    """Returns the names that break each rule, sorted, for the whole repository."""
    documented = [each for path in sources("moe_jax") for each in public(path)]
    found = {
        "parameters": [
            name
            for name, node in documented
            if isinstance(node, ast.FunctionDef)
            and num_parameters(node) > MAX_PARAMETERS
            and name not in MANY_PARAMETERS
            and not is_device_code(node)
        ],
        "call parameters": [
            name
            for name, node in documented
            if name.startswith(("moe_jax/layers/", "moe_jax/models/"))
            and name.endswith(".__call__")
            and isinstance(node, ast.FunctionDef)
            and num_parameters(node) > MAX_CALL_PARAMETERS
        ],
        "first words": [name for name, node in documented if first_word(ast.get_docstring(node) or "") in FIRST_WORDS],
        "long sentences": [name for name, node in documented if longest_sentence(ast.get_docstring(node) or "") > MAX_WORDS],
        "translated idioms": [
            f"{path.relative_to(ROOT)}:{line}: {sentence}"
            for folder in ("moe_jax", "tests", "examples", "benchmarks")
            for path in sources(folder)
            for line, text in texts(path)
            for sentence in prose.idioms_of_text(text)
        ],
        "class names": repeated_class_names(documented),
        "test names": [
            name for path in sources("tests") for name in test_names(path) if len(name.split(":")[1]) > MAX_TEST_NAME
        ],
    }
    return {rule: sorted(names) for rule, names in found.items()}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Returns a file's syntax tree."""
    return ast.parse(path.read_text())


def sources(folder: str) -> list[Path]:
    """Returns the Python files of a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


def public(path: Path) -> Iterator[Documented]:
    """Yields a file's module, its public classes and functions, and the public methods of these classes."""
    tree, file = parsed(path), str(path.relative_to(ROOT))
    yield Documented(file, tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield Documented(f"{file}:{node.name}", node)
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, ast.FunctionDef) and re.match(r"[^_]|__\w+__$", method.name):
                    yield Documented(f"{file}:{node.name}.{method.name}", method)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, string under a field or constant, and comment, also of private names."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    last, comment = 0, ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := re.search(r"(?:^ *|  )# (.*)", line):
            if number > last + 1:
                yield last, comment
                comment = ""
            last, comment = number, f"{comment} {found[1]}"
    yield last, comment


def num_parameters(function: ast.FunctionDef) -> int:
    """Returns the number of a function's parameters; `*args` and `**kwargs` are one each, `self` and `cls` none."""
    of = function.args
    named = [each.arg for each in of.posonlyargs + of.args + of.kwonlyargs]
    return len([name for name in named if name not in ("self", "cls")]) + (of.vararg is not None) + (of.kwarg is not None)


def is_device_code(function: ast.FunctionDef) -> bool:
    """Returns whether a function is Triton's, where pointers, sizes and block sizes are passed one by one."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def first_word(docstring: str) -> str:
    """Returns the first word of a docstring."""
    return re.match(r"\W*(\w*)", docstring)[1]


def longest_sentence(docstring: str) -> int:
    """Returns the number of words of the longest sentence; a code span is one word, formulas and code blocks are none."""
    sentences = [sentence for text in paragraphs(docstring) for sentence in re.split(r"(?<!e\.g|i\.e)[.!?]\)?\s+", text)]
    return max((len(re.findall(r"\w[^\s]*", sentence)) for sentence in sentences), default=0)


def paragraphs(docstring: str) -> Iterator[str]:
    """Yields a docstring's texts, each in a line: paragraphs, list items, and arguments without their names, no tables."""
    docstring = re.sub(r"^\s*```.*?^\s*```", "", docstring, flags=re.DOTALL | re.MULTILINE)
    docstring = re.sub(r"(`+).+?\1", "code", docstring, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        is_table = any(re.search(r"\S {3,}\S", line) for line in lines)
        if not lines or is_table or all(line.startswith("    ") or line.lstrip().startswith("|") for line in lines):
            continue
        text = ""
        in_section = False
        for line in lines:
            in_section = in_section or line.strip() in SECTIONS
            begins = re.match(r"\s*([-*]|\d+\.)\s+", line) or (in_section and re.match(r"\s{1,4}\S[^:]{0,80}:(\s|$)", line))
            if begins or line.strip() in SECTIONS:
                yield text
                text = ""
            text += " " + (line[begins.end() :] if begins else line).strip()
        yield text


def repeated_class_names(documented: list[Documented]) -> list[str]:
    """Returns the public classes that share their name with another public class of the package."""
    classes = [name for name, node in documented if isinstance(node, ast.ClassDef)]
    count = Counter(name.split(":")[1] for name in classes)
    return [name for name in classes if count[name.split(":")[1]] > 1]


def test_names(path: Path) -> Iterator[str]:
    """Yields `file:function` for each test of a file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path.relative_to(ROOT)}:{node.name}"
