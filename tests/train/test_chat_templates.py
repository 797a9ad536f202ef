"""A user's chat template is used for training, and saved with the model."""

import json

import pytest
import tiny

import moe_jax
from moe_jax.cli import main
from moe_jax.train import load_tokenizer
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.chat_templates import CHATML, with_chat_template

CHAT = [
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "bye"},
]


def test_chatml_marks_answers_and_their_end_tokens():
    """An answer ends with the token that ends generation. The template refuses tools."""
    plain = tiny.tokenizer(None)
    tokenizer = with_chat_template(plain, "chatml")
    tokens, trained = chat_tokens(tokenizer, CHAT)
    assert tokenizer.decode(tokens[trained]) == "hello<|end|>bye<|end|>" and not plain.chat_template
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(tokens).startswith(prompt)
    with pytest.raises(ValueError, match="the chatml template has no tools"):
        chat_tokens(tokenizer, CHAT, [{"name": "add"}])


def test_a_template_file_is_read(tmp_path):
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    assert with_chat_template(tiny.tokenizer(None), str(tmp_path / "own.jinja")).chat_template == tiny.CHATML
    (tmp_path / "own.jinja").write_text("\n")
    with pytest.raises(ValueError, match="own.jinja is empty"):
        with_chat_template(tiny.tokenizer(), str(tmp_path / "own.jinja"))


def test_a_given_template_replaces_the_saved_tokenizers(tmp_path):
    tiny.tokenizer("old").save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "old" / "tokenizer_config.json").read_text())
    (tmp_path / "old" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "new", tokenizer_from=tmp_path / "old", chat_template=CHATML)
    assert load_tokenizer(tmp_path / "old").chat_template == "old"
    assert load_tokenizer(tmp_path / "new").chat_template == CHATML
    assert "chat_template" not in json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())


def test_a_run_and_its_conversion_have_the_template(tmp_path):
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "base")
    tiny.tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    paths = {"--model": tmp_path / "base", "--data": tmp_path / "chats.jsonl", "--output": tmp_path / "run"}
    options = "--seq-len 64 --batch-size 1 --steps 1 --warmup-steps 0 --chat-template chatml --dtype float32".split()
    main(["finetune", *(str(part) for pair in paths.items() for part in pair), *options])
    tokenizer = ["--tokenizer", str(tmp_path / "base")]
    main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", *tokenizer])
    assert all(load_tokenizer(folder).chat_template == CHATML for folder in (tmp_path / "run" / "model", tmp_path / "hf"))
