"""`moe-jax convert` of a training run writes the tokenizer that the run was trained with."""

import moe_jax
from moe_jax.cli import main
from moe_jax.recipes import finetune
from tests.helpers import tiny


def test_a_runs_tokenizer_goes_along(tmp_path, capsys):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    texts = tiny.write_texts(tmp_path / "texts")
    settings = tiny.settings(tmp_path, model=str(tmp_path / "base"), data=str(texts), steps=1, warmup_steps=0)
    finetune(settings)
    main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"])
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()
    (tmp_path / "base" / "tokenizer.json").unlink()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (tmp_path / "base" / name).unlink(missing_ok=True)
    capsys.readouterr()
    main(["convert", str(tmp_path / "run"), str(tmp_path / "without"), "--to", "hf"])
    assert "no tokenizer is written; name one with --tokenizer: tokenizer_from=" in capsys.readouterr().out
    assert not (tmp_path / "without" / "tokenizer.json").exists()
