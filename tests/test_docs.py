"""The pages keep their promises: snippets run, commands parse, numbers are where links point, the site has no dead link."""

import ast
import itertools
import math
import os
import re
import shlex
from pathlib import Path

import pytest
import tyro
import yaml

from benchmarks import results
from moe_jax import cli
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep
from moe_jax.cost.machine import machine
from moe_jax.cost.memory import memory_bytes
from moe_jax.parallel import MeshShape
from moe_jax.train.data.chat import chat_tokens
from tests.helpers import prose, tiny

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TASK_PAGES = "getting_started data preferences reinforcement your_own_loss your_own_model many_gpus troubleshooting"
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in TASK_PAGES.split())]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\$(\w+)")
GIB = 2**30


def fences(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def test_readme_says_what_fits():
    assert fits_table() in (ROOT / "README.md").read_text(), f"README's table should be\n{fits_table()}"


GPUS = {"24 GB": "rtx4090", "48 GB": "l40s", "80 GB": "h100", "141 GB": "h200"}

PUBLISHED = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-8B": "qwen3-8b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}
TASKS = {"generate": None, "fine-tune": ("float32", "float32"), "fine-tune, bf16": ("bfloat16", "bfloat16")}


def fits_table() -> str:
    """README's table, from the model of cost."""
    columns = [(task, devices) for task in TASKS for devices in (1, 8)]
    names = [f"{task}, 1 GPU" if devices == 1 else "8 GPUs" for task, devices in columns]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, name in PUBLISHED.items():
        needs = [needed(NAMED_CONFIGS[name], TASKS[task], devices) for task, devices in columns]
        lines.append(f"| {label} | " + " | ".join(map(cell, needs)) + " |")
    return "\n".join(lines)


def cell(need: float) -> str:
    """GiB, and the smallest GPU that has them."""
    size = f"{need / GIB:,.0f}" if need > 9.95 * GIB else f"{need / GIB:.1f}"
    return next((f"{size}: {gpu}" for gpu, name in GPUS.items() if need <= machine(name).memory), f"{size}: no")


def needed(config, dtypes, devices: int) -> float:
    """Bytes of one GPU: of weights and cache to generate, of a training step otherwise."""
    if dtypes is not None:
        kept = dict(param_dtype=dtypes[0], moment_dtype=dtypes[1])
        step = PlannedStep(config, MeshShape(fsdp=devices), devices, 4096, hops="copies", **kept)
        return sum(memory_bytes(step).values())
    config = config.without_mtp()
    experts = math.gcd(devices, config.experts.num_experts) if config.moe_layers else 1
    step = PlannedStep(config, MeshShape(fsdp=devices // experts, expert=experts), devices, 4096)
    cache = 4096 * config.num_hidden_layers * config.mixer.travelling_elements
    return 2 * (sum(parameter.used_size for parameter in step.parameters) + cache)


def test_readmes_numbers_stand_where_its_links_point():
    table = (ROOT / "README.md").read_text().split("| bf16, NVIDIA H200 |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for row in table:
        what, *figures = row.strip("| ").split(" | ")
        page, anchor = re.search(r"\]\(docs/(\w+\.md)#([\w-]+)\)", what).groups()
        section = section_of(DOCS / page, anchor)
        for number in re.findall(r"\d+\.?\d*", " ".join(figures).replace("16 H100", "")):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", section), f"{number} is not in {page}#{anchor}"


def test_performance_page_has_the_results():
    page = results.PAGE.read_text()
    assert page == results.page(page), "run `python benchmarks/results.py`"
    assert page.count("\n") <= 250, "a newer row replaces an older one, which docs/log/ keeps"


@pytest.mark.parametrize("name", sorted(path.stem for path in results.RESULTS.glob("*.jsonl")))
def test_results_are_in_the_log_that_they_name(name):
    for result in results.read(name):
        page, anchor = result["log"].split("#")
        section = section_of(DOCS / "log" / page, anchor)
        for number in re.findall(r"\d[\d.,]*\d|\d", f"{result['value']} {result['compared_value'] or ''}"):
            for part in number.split(", "):
                assert re.search(rf"(?<![\d.]){re.escape(part)}(?![\d.]*\d)", section), (
                    f"{result['claim']}: {part} is not there"
                )


def test_every_log_entry_begins_with_a_dated_verdict():
    for page in sorted((DOCS / "log").glob("*.md")):
        for title, first in re.findall(r"^## (.*)\n\n(.*)", page.read_text(), re.MULTILINE):
            assert re.fullmatch(r"\*2026-\d\d-\d\d.* \(.+\).*\*", first), f"{page.name}, {title}: begin with date and verdict"


def section_of(page: Path, anchor: str) -> str:
    """The text below the heading with this anchor, up to the next heading of its level or above."""
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        level, _, title = line.partition(" ")
        if set(level) == {"#"} and slug(title) == anchor:
            ends = (j for j in range(i + 1, len(lines)) if re.match(rf"#{{1,{len(level)}}} ", lines[j]))
            return "\n".join(lines[i : next(ends, len(lines))])
    raise AssertionError(f"{page.name} has no heading #{anchor}")


def slug(title: str) -> str:
    """A heading's anchor, on GitHub and in the site."""
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def test_pages_agree_on_what_ran_in_several_processes():
    said = one_line(re.search(r"## What was run\n\n(.*?)\n\n", (DOCS / "many_gpus.md").read_text(), re.DOTALL).group(1))
    assert "`moe-jax launch`" in said
    for page in (ROOT / "README.md", DOCS / "scaling.md"):
        assert said in one_line(page.read_text()), f"{page.name} must say of processes what docs/many_gpus.md says: {said}"


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")]), ids=lambda page: str(page.relative_to(ROOT))
)
def test_pages_are_plain(page):
    """Lines and table cells of at most 128 columns, sentences of at most 25 words."""
    found = [*prose.long_lines(page.read_text()), *prose.long_sentences(page.read_text())]
    assert not found, f"{page.name}: shorten\n" + "\n".join(found)


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")]), ids=lambda page: page.stem)
def test_pages_have_no_translated_idioms(page):
    """Pages but docs/log, which keeps earlier entries as they were written."""
    found = list(prose.idioms(page.read_text()))
    assert not found, f"{page.name}: write as an American engineer would\n" + "\n".join(found)


def test_readme_begins_with_make_demo_and_make_test():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in first_screen and "make test" in first_screen


def test_the_template_in_data_md_shows_what_is_learned():
    (template,) = fences(DOCS / "data.md", "jinja")
    tokenizer = tiny.tokenizer(template)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    tokens, learned = chat_tokens(tokenizer, messages)
    assert tokenizer.decode(tokens[learned]) == "4.<|im_end|>"


def test_contributing_names_paths_that_exist():
    named = re.findall(r"\b(?:tests|moe_jax)/[\w/.]*\w", CONTRIBUTING.read_text())
    assert len(named) > 20 and not [path for path in named if not (ROOT / path).exists()]


def test_troubleshooting_quotes_messages_that_exist():
    quoted = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 10
    messages = [text for path in sorted((ROOT / "moe_jax").rglob("*.py")) for text in literals(ast.parse(path.read_text()))]
    for quote in quoted:
        assert any(has_in_order(message, quote.split("...")) for message in messages), f"nothing says {quote!r} any more"


def has_in_order(text: str, parts: list[str]) -> bool:
    """Returns whether a text has parts one after the other. Regular expressions take ten seconds for all docstrings."""
    for part in parts:
        _, found, text = text.partition(part) if part else ("", True, text)
        if not found:
            return False
    return True


def literals(tree: ast.AST) -> list[str]:
    """All string literals, with three dots for what an f-string inserts."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
    return found


def commands() -> list:
    """Every whole `moe-jax` line of the pages; the command that `launch` would start is one of its own."""
    found = []
    for page in [
        *PAGES,
        CONTRIBUTING,
        *(DOCS / f"{name}.md" for name in ("scaling", "balancing", "parallel_experts", "schedules")),
    ]:
        blocks = fences(page, "", "bash") + [
            argument for block in fences(page, "yaml") for argument in arguments_of_pods(block)
        ]
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if "moe-jax" not in line or "..." in line or line.startswith("#"):
                continue
            words = shlex.split(
                VARIABLE.sub(lambda found: "0" if "INDEX" in found[1] else found[1], line).split("||")[0], comments=True
            )
            found += [(page, words[i + 1 :]) for i, word in enumerate(words) if word == "moe-jax"]
    return [pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}") for page, words in found]


def arguments_of_pods(text: str) -> list[str]:
    """The command lines of a Kubernetes file's containers."""
    jobs = [document for document in yaml.safe_load_all(text) if document["kind"] == "Job"]
    return [line for job in jobs for pod in job["spec"]["template"]["spec"]["containers"] for line in pod["args"]]


class Parsed(Exception):
    """Ends the program where it would begin to work."""


@pytest.mark.parametrize("words", commands())
def test_commands_parse(words, tmp_path, monkeypatch):
    parse = tyro.cli

    def stop(*arguments, **options):
        command = parse(*arguments, **options)
        # finetune checks its values here.
        raise Parsed(getattr(command, "settings", command))

    monkeypatch.setattr(tyro, "cli", stop)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    words = [word.removeprefix("/") for word in words]
    for option, value in itertools.pairwise(words):
        if option in ("--data", "--chat-template"):
            path = Path(value.split(",")[0])
            path.parent.mkdir(parents=True, exist_ok=True)
            # A data set of the hub has a split, and is no file.
            if "split=" not in value:
                path.touch()
    with pytest.raises(Parsed):
        cli.main(words)
