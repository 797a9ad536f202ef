"""A tokenizer beside a model: it is found, or one error names where it was looked for."""

import re

import pytest
import tiny

import moe_jax
from moe_jax.checkpoint import hub
from moe_jax.checkpoint.tokenizer import load_tokenizer


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
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", None)
    assert load_tokenizer("someone/some-model")("a")["input_ids"] and asked == ["someone/some-model"]


def test_a_model_without_a_tokenizer_has_none(tmp_path):
    """From config.json alone, transformers makes a tokenizer of special tokens."""
    moe_jax.save_pretrained(tiny.dense(), tmp_path)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: it has no"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content", [("tokenizer.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")], ids=str
)
def test_files_that_are_json_but_of_no_tokenizer_are_one_error(tmp_path, name, content):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: "):
        load_tokenizer(tmp_path)
