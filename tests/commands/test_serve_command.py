"""`moe-jax serve` and `moe-jax chat` on a small model."""

import io
import os
import re
import signal
import threading

import openai
import pytest

import moe_jax
from moe_jax.adapters import save_adapter
from moe_jax.cli import main
from tests.helpers import served, tiny
from tests.helpers.adapted_models import with_adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), made / "model", tokenizer_from=made / "tokenizer")
    return made / "model"


@pytest.fixture(scope="module")
def adapter(folder):
    model = with_adapters(moe_jax.from_pretrained(folder, dtype="float32"), targets=("attention",))
    save_adapter(model, folder.parent / "adapter")
    return folder.parent / "adapter"


@pytest.fixture
def program_log(caplog):
    """The lines of a command's log. A late SIGTERM does not end the tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield lambda: caplog.text
    signal.signal(signal.SIGTERM, before)


@pytest.mark.long
def test_a_model_is_served_until_a_signal(folder, adapter, program_log, monkeypatch):
    monkeypatch.setenv("MOE_JAX_API_KEY", "secret")
    small = f"--max-sequences 1 --max-tokens-per-step 16 --max-length 64 --num-pages 4 --adapters french={adapter}".split()
    found = {}

    def ask() -> None:
        try:
            assert served.comes_true(lambda: "serving small" in program_log(), 200)
            url = re.search(r"http://[^\s]+", program_log())[0]
            with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
                options = dict(model="small", max_tokens=8, temperature=0)
                found["text"] = client.completions.create(prompt="ab", **options).choices[0].text
                drawn = client.completions.create(prompt="ab", model="small", max_tokens=8, n=4, seed=1).choices
                # OpenAI's temperature of 1, where neither the request nor the model has one.
                found["drawn"] = len({choice.text for choice in drawn})
                adapted = client.completions.create(prompt="ab", **options | {"model": "french"})
                found["adapted"] = adapted.choices[0].text
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    main(["serve", str(folder), "--port", "0", "--name", "small", "--dtype", "float32", "--lazy", *small])
    asking.join()
    assert program_log().index("is compiled when a request first needs it") < program_log().index("serving small")
    assert program_log().index("serving small") < program_log().index("compiled program")
    assert "stopped: 0 running requests finished, 0 were aborted" in program_log()
    alone, adapted = (moe_jax.from_pretrained(folder, adapter=each, dtype="float32") for each in (None, adapter))
    assert found == {
        "text": moe_jax.complete(alone, "ab", max_new_tokens=8),
        "adapted": moe_jax.complete(adapted, "ab", max_new_tokens=8),
        "drawn": 4,
    }


@pytest.mark.thorough
def test_drafts_change_no_answer(tmp_path, monkeypatch, capsys):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.deepseek(mtp=1), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    answers = []
    for drafts in ([], ["--drafts"], ["--drafts", "lookup:2"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
        main(["chat", str(tmp_path / "model"), *"--max-length 128 --max-new-tokens 20 --dtype float32".split(), *drafts])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2] != "\n"


@pytest.mark.thorough
def test_a_model_answers_lines(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    main(["chat", str(folder), *"--max-length 128 --max-new-tokens 6 --dtype float32".split()])
    model = moe_jax.from_pretrained(folder, dtype="float32")
    assert capsys.readouterr().out == moe_jax.chat(model, "ab", max_new_tokens=6) + "\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("serve {} --port 0 --num-pages 1", "num_pages must be at least 2"),
        ("serve {} --port 0 --max-length 66 --num-pages 2", "--max-length 66 is more than the 65 tokens"),
        ("serve {} --port 0 --request-seconds 0", "request_seconds must be above 0"),
        ("serve {} --host 192.0.2.1", "the server cannot listen on 192.0.2.1:8000"),
        ("serve {} --api-key=", "api_key must be printable ASCII"),
        ("serve {} --adapters french", "--adapters must be NAME=FOLDER, as in french=runs/french/adapter; got 'french'"),
        ("serve {} --adapters a=x a=y", "--adapters: there is already a model or an adapter 'a'; choose another name"),
        ("serve {} --adapters a=x --max-adapters 0", "--max-adapters must be at least 1, the number of --adapters; got 0"),
        ("serve {} --adapters a={}/../adapter --max-adapter-rank 5", "has rank 6, above max_adapter_rank=5"),
        ("serve {} --max-model-len 3", "serve has no --max-model-len; did you mean --max-length?"),
        ("serve {} --port 0 --drafts", "drafts need a model loaded with its MTP modules"),
        ("chat {} --drafts", "drafts need a model loaded with its MTP modules"),
        ("serve {} --drafts lookup:9", "drafts must be 0 or 1, 'module', or 'lookup:N' with N from 1 to 8; got 'lookup:9'"),
        ("serve {} --drafts=lookup:3 --max-tokens-per-step 300", "must be at least 4 times max_sequences; got 300 and 256"),
        ("chat {} --temperature -1", "temperature must be a finite number, 0 or more"),
        ("chat {} --max-new-tokens 0", "max_new_tokens must be an integer, at least 1"),
    ],
)
def test_wrong_options_are_named_before_weights_are_read(folder, adapter, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    with pytest.raises(SystemExit):
        main(arguments.format(folder, folder).split())
    assert message in capsys.readouterr().err
