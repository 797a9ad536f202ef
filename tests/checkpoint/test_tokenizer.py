"""The tokenizer in a model's folder: it is found, or one error names where it was looked for."""

import base64
import json
import re
import sys

import pytest

import moe_jax
from moe_jax.checkpoint import hf_files
from moe_jax.checkpoint.companions import tokenizer_contents
from moe_jax.checkpoint.tokenizer import load_tokenizer
from tests.helpers import tiny


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: "):
        load_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match=r"no tokenizer can be read: '.*/no/such' is neither a folder with a checkpoint nor a model on "
    ):
        load_tokenizer(tmp_path / "no" / "such")


def test_a_tokenizer_on_the_hub_is_asked_for_once(tmp_path, monkeypatch):
    tiny.tokenizer().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(hf_files.huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", None)
    assert load_tokenizer("someone/some-model")("a")["input_ids"] and asked == ["someone/some-model"]


def test_a_model_without_a_tokenizer_has_none(tmp_path):
    """From config.json alone, transformers makes a tokenizer of special tokens."""
    moe_jax.save_pretrained(tiny.dense(), tmp_path)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: it has no"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ValueError, match="it has no tokenizer files$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content", [("tokenizer.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")], ids=str
)
def test_files_that_are_json_but_of_no_tokenizer_are_one_error(tmp_path, name, content):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: "):
        load_tokenizer(tmp_path)


TOKENS = [
    *("ab", "abc", " x", b"\xe4\xb8", "中", "'s", "12", "34", "123", "  ", "\n\n"),
    *("Aa", "aA", b"\xe6\x96", "文", "中文", "文a"),
]
FIRST = 256 + len(TOKENS)


def write_kimi(folder, module="tokenization_kimi"):
    """Writes the files of Kimi K2's tokenizer, with few tokens; its code would end the program."""
    tokens = [bytes([i]) for i in range(256)] + [token if isinstance(token, bytes) else token.encode() for token in TOKENS]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / f"{module}.py").write_text("raise SystemExit(1)")
    special = {FIRST: ("[BOS]", True), FIRST + 1: ("[EOS]", True), FIRST + 4: ("<think>", False)}
    fields = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": text, "special": flag} for i, (text, flag) in special.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<think>{{ m.content }}[EOS]{% endfor %}")


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr("builtins.input", None)
    monkeypatch.setattr(sys, "stdin", None)


@pytest.mark.parametrize("module", ["tokenization_kimi", "tokenization_moonshot"])
def test_ranks_of_kimi_give_the_ids_of_tiktoken(tmp_path, module, no_terminal):
    write_kimi(tmp_path, module)
    tokenizer = load_tokenizer(tmp_path)
    # The ids of tiktoken 0.14 with the repository's pattern.
    expected = {
        "abc x's": [257, 258, 261],
        "中文abc 1234": [271, 257, 32, 264, 52],
        "aAa  x\n\n\n <think>中[EOS]": [97, 267, 32, 258, 266, 10, 32, FIRST + 4, 260, FIRST + 1],
        f"<|reserved_token_{FIRST + 9}|>": [FIRST + 9],
    }
    for text, ids in expected.items():
        assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("[BOS]", "[EOS]", FIRST + 256)
    assert tokenizer.decode([FIRST + 4, 97, FIRST + 1], skip_special_tokens=True) == "<think>a"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])["input_ids"] == [FIRST + 4, 257, FIRST + 1]


def test_a_tokenizer_that_is_python_code_is_not_run(tmp_path, no_terminal):
    write_kimi(tmp_path, "tokenization_other")
    with pytest.raises(
        ValueError, match=r"the Python code tokenization_other.py, which is not run. Convert it to a tokenizer.json"
    ):
        load_tokenizer(tmp_path)
    tiny.tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path)("a")["input_ids"]


def test_cut_ranks_are_refused(tmp_path):
    write_kimi(tmp_path)
    file = tmp_path / "tiktoken.model"
    for lines, message in (
        (FIRST - 1, f"has {FIRST - 1} tokens, and special tokens have the ids {FIRST} to"),
        (0, "has 0 tokens"),
    ):
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:lines]))
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)
    file.write_bytes(b"AA==")
    with pytest.raises(ValueError, match="no tokenizer can be read from the folder"):
        load_tokenizer(tmp_path)


def test_exports_keep_the_files_of_a_tokenizer_in_python(tmp_path):
    write_kimi(tmp_path)
    files = tokenizer_contents(tmp_path, None, None)
    assert files.keys() == {"tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json", "chat_template.jinja"}
