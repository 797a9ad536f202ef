"""Types as a user's checker sees them: the package is typed (PEP 561), and an editable install is found without running it."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import moe_jax
from moe_jax.layers import MoE
reveal_type(moe_jax.from_pretrained("folder", dtype="float32", param_dtype=None))
reveal_type(MoE)
reveal_type(moe_jax.complete("folder", "text"))
reveal_type(moe_jax.chat("folder", ["text", "other"]))
"""


def test_mypy_knows_the_types_of_an_editable_install(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("setuptools", "80")
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    code = f"import setuptools.build_meta as backend; backend.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--python-executable", str(environment / "bin" / "python"), "--ignore-missing-imports", "--cache-dir", "cache"]
    found = subprocess.run([sys.executable, "-m", "mypy", *options, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    types = [line.partition("Revealed type is ")[2] for line in found.stdout.splitlines()]
    assert types[0] == '"moe_jax.models.decoder.Decoder"', found
    assert types[1].startswith('"def (hidden_size: int, moe_intermediate_size: int')
    assert types[2:4] == ['"str"', '"list[str]"'], found
