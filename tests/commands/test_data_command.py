"""`moe-jax data` shows the first documents with learned text marked, and counts."""

import json
import subprocess
import sys

import pytest

from moe_jax.cli import main
from tests.helpers import tiny

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.fixture
def model(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_number_below_zero_is_refused(model, capsys):
    with pytest.raises(SystemExit):
        main(["data", "none.jsonl", "--model", model, "--documents", "-1"])
    assert capsys.readouterr().err == "moe-jax: --documents must be at least 0; got -1\n"


def test_numbers_and_documents_are_printed(tmp_path, model, capsys):
    rows = [{"conversations": CHAT, "id": 1}] * 3 + [{"conversations": 3}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.csv").write_text("text\n" + "x" * 70 + "\n")
    options = ["--seq-len", "64", "--documents", "2", "--skip-bad-documents"]
    data = [f"{tmp_path}/a.jsonl,weight=3", f"{tmp_path}/b.csv,weight=1"]
    main(["data", *data, "--model", model, *options])
    printed = capsys.readouterr().out
    assert f"{tmp_path}/a.jsonl: sharegpt, 3 documents, weight 3: 3 of 4 in an epoch, each 1 times, " in printed
    assert "keys that are not read: id" in printed and f"1 bad row left out: {tmp_path}" in printed
    numbers = dict(line.split("  ", 1) for line in printed.splitlines() if "  " in line)
    numbers = {name: value.strip() for name, value in numbers.items()}
    chat = len("user\nhello") + len("assistant\nhi") + 2 * 3
    assert numbers["documents"] == "4" and numbers["tokens"] == str(3 * chat + 71)
    learned = 3 * 3 + 70
    assert numbers["learned"].startswith(f"{learned} (") and numbers["masked"] == str(3 * chat + 71 - learned)
    assert numbers["documents that are cut"] == "1" and numbers["tokens dropped by cuts"] == "0"
    assert printed.count("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[hi<|im_end|>]]\n") == 2


def test_a_runs_folder_names_the_tokenizer_of_its_base(tmp_path, model, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model}))
    main(["data", f"{tmp_path}/a.jsonl", "--model", f"{tmp_path}/run"])
    assert "[[hi<|im_end|>]]" in capsys.readouterr().out


def test_weights_are_shown(tmp_path, model, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}, *CHAT]}))
    main(["data", f"{tmp_path}/a.jsonl", "--model", model])
    printed = capsys.readouterr().out
    assert "learned                   6 (" in printed and "weight of learned         4.5\n" in printed
    assert "\n[[0.5 x hi<|im_end|>]]\n" in printed and "\n[[hi<|im_end|>]]\n" in printed


def test_learned_text_is_green_on_terminals(tmp_path, model, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["data", f"{tmp_path}/a.jsonl", "--model", model])
    assert "<|im_start|>assistant\n\033[32mhi<|im_end|>\033[0m\n" in capsys.readouterr().out


def test_bad_rows_stop_it(tmp_path, model, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"txet": "x"}\n')
    with pytest.raises(SystemExit):
        main(["data", f"{tmp_path}/a.jsonl", "--model", model])
    assert f'{tmp_path}/a.jsonl:2: needs an object with the key "text"; it has the keys txet' in capsys.readouterr().err


@pytest.mark.usefixtures("without_torch")
def test_commands_that_do_not_start_jax(tmp_path, model):
    (tmp_path / "a.jsonl").write_text('{"text": "x y z"}\n')
    data = ["data", str(tmp_path / "a.jsonl"), "--model", model]
    schedule = "schedule 1f1b --ranks 2 --micro-batches 2".split()
    code = f"import sys; from moe_jax.cli import main; main({data}); main({schedule}); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[[" in done.stdout and "rank 0 |" in done.stdout
