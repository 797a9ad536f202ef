"""A tokenizer beside a model: it is found, or one error names where it was looked for."""

import re

import pytest
import tiny

from moe_jax.checkpoint.tokenizer import load_tokenizer


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: "):
        load_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match=r"no tokenizer can be read from '.*/no/such', neither a folder nor a model on the hub: "
    ):
        load_tokenizer(tmp_path / "no" / "such")


def test_a_model_without_a_tokenizer_has_none(tmp_path):
    """transformers makes one of special tokens alone, of config.json."""
    tiny.dense().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: there are no"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content", [("tokenizer.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")], ids=str
)
def test_files_that_are_json_but_of_no_tokenizer_are_one_error(tmp_path, name, content):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"no tokenizer can be read from the folder {re.escape(str(tmp_path))}: "):
        load_tokenizer(tmp_path)
