"""The pages' snippets run unchanged, and their site has no dead link."""

import fcntl
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_jax
from moe_jax import train
from tests.helpers import tiny
from tests.test_docs import DOCS, PAGES, ROOT, fences


def snippets() -> list:
    """All snippets but those with which another begins."""
    found = {code: f"{page.stem}-{i}" for page in PAGES for i, code in enumerate(fences(page, "python"))}
    return [
        pytest.param(code, id=name)
        for code, name in found.items()
        if not any(other != code and other.startswith(code) for other in found)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny models in place of the hub's, by their hub ids."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    found = {}
    mixtures = dict.fromkeys(("Qwen/Qwen3-30B-A3B", "allenai/OLMoE-1B-7B-0924-Instruct"), tiny.model())
    for hub_id, model in {"Qwen/Qwen3-0.6B": tiny.dense(), **mixtures}.items():
        found[hub_id] = folder / hub_id.split("/")[1]
        moe_jax.save_pretrained(model, found[hub_id], tokenizer_from=folder / "tokenizer")
    return found


@pytest.mark.parametrize("code", snippets())
def test_python_snippets_run_as_pasted(code, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for hub_id, folder in checkpoints.items():
        code = code.replace(f'"{hub_id}"', repr(str(folder)))
    log = logging.getLogger("moe_jax")
    monkeypatch.setattr(log, "level", log.level)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    if Path("chats.jsonl").exists():
        assert train.open_documents("chats.jsonl").format == "chat"


MODULES = [
    *("", ".generation", ".models", ".layers", ".kernels", ".train", ".preferences", ".reinforcement", ".recipes"),
    *(".parallel", ".parallel.pipeline", ".checkpoint", ".config", ".cost"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, once for all test processes."""
    room = tmp_path_factory.getbasetemp()
    room = room.parent if "PYTEST_XDIST_WORKER" in os.environ else room
    with (room / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (room / "site").exists():
            done = build(ROOT, room / "unfinished")
            assert done.returncode == 0, done.stdout + done.stderr
            (room / "unfinished").rename(room / "site")
    return room / "site"


def build(root: Path, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


def test_the_site_has_pages_and_the_files_they_link_to(site):
    assert (site / "index.html").is_file() and (site / "examples" / "finetune.py").is_file()


def test_dead_links_fail_the_build(tmp_path):
    """Builds one page with the settings and hooks of our site."""
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "hooks.py", tmp_path / "docs")
    pages = "README.md", "CONTRIBUTING.md", "CHANGELOG.md"
    for name in pages:
        (tmp_path / name).write_text("# Title\n")
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\nnav: [index.md, page.md, {', '.join(pages[1:])}]\n")
    (tmp_path / "docs" / "page.md").write_text("[1](index.md#nothing) [2](../examples/nothing.py) [3](nothing.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and done.stderr.count("WARNING") == 3


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.glob("*.html"):
        assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="https?:', page.read_text()), page.name


def test_the_api_page_has_every_public_name(site):
    shown = set(re.findall(r'id="([^"]+)"', (site / "api.html").read_text()))
    for module in (importlib.import_module(f"moe_jax{name}") for name in MODULES):
        public = {public: getattr(module, public) for public in getattr(module, "__all__", ())}
        missing = [
            public
            for public, value in public.items()
            if callable(value) and not shown & {f"{module.__name__}.{public}", f"{value.__module__}.{value.__name__}"}
        ]
        assert not missing, f"add to docs/api.md, behind {module.__name__}: {missing}"
