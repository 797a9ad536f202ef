"""Answers come in pieces, and the next message sees the answers, as far as they were written."""

import contextlib
import io

import pytest

from moe_jax.commands import chat
from moe_jax.serving.conversation import Conversation
from moe_jax.serving.request import SamplingOptions
from tests.helpers import served
from tests.helpers.fake_engine import FakeEngine

OPTIONS = SamplingOptions(max_new_tokens=7, stop_token_ids=(0, 2))


@pytest.fixture
def engine():
    made = FakeEngine()
    yield made
    made.close()


def prompts(engine) -> list[str]:
    return [served.tokenizer().decode(handle.prompt) for handle in engine.handles]


def test_the_next_prompt_holds_the_answer_before(engine):
    conversation = Conversation(engine, OPTIONS, system="be short")
    pieces = list(conversation.answers("hi"))
    assert "".join(pieces) == "system" and len(pieces) > 3
    assert "".join(conversation.answers("again")) == "system"
    begin = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n"
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    assert prompts(engine) == [f"{begin}hi{answer}", f"{begin}hi{answer}system<|im_end|>\n<|im_start|>user\nagain{answer}"]
    conversation.clear()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(engine):
    engine.step_seconds = 0.01
    conversation = Conversation(engine, OPTIONS)
    with contextlib.closing(conversation.answers("hi")) as pieces:
        while next(pieces) != "s":
            pass
    assert conversation.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "us"}]
    assert served.comes_true(lambda: engine.handles[0].completions[0] is not None)
    assert engine.handles[0].completions[0].finish_reason == "abort"


def test_an_answer_may_fill_the_engine_and_ends_at_its_end_token(engine):
    ends = tuple(served.tokenizer()("h")["input_ids"])
    for most in (0, 9999):
        conversation = Conversation(engine, SamplingOptions(max_new_tokens=most, stop_token_ids=ends))
        assert "".join(conversation.answers("hi")) == "user\n"
        assert engine.submitted[-1].max_new_tokens == 512 - len(engine.handles[-1].prompt)


def test_lines_are_answered_until_the_input_ends(engine, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["hi", "", "x" * 600, "/new", "there"])))
    chat.talk(Conversation(engine, OPTIONS))
    printed = capsys.readouterr()
    assert printed.out == "user\nh\nuser\nt\n"
    assert (
        printed.err.startswith("moe-jax: a prompt of 6")
        and "exceed the engine's max_length=512" in printed.err
        and "max" not in printed.err.split("exceed")[0]
    )
    assert [prompt.count("<|im_start|>user") for prompt in prompts(engine)] == [1, 1]


def test_commands_are_no_messages(engine, monkeypatch, capsys):
    """A path is a message: it has a further slash."""
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/nwe\n/quit now\n/etc/hosts\n"))
    chat.talk(Conversation(engine, OPTIONS))
    unknown = "moe-jax: no command /nwe; /help lists them\nmoe-jax: no command /quit; /help lists them\n"
    assert capsys.readouterr().err == f"{chat.HELP}\n{unknown}"
    assert len(prompts(engine)) == 1 and "/etc/hosts" in prompts(engine)[0]


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_a_command_ends_the_conversation(engine, monkeypatch, capsys, command):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n{command}\nmore\n"))
    chat.talk(Conversation(engine, OPTIONS))
    assert len(prompts(engine)) == 1 and not capsys.readouterr().err


def test_ctrl_c_ends_the_answer_alone(engine, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nmore\n"))
    conversation = Conversation(engine, OPTIONS)
    answers = conversation.answers

    def interrupted(text):
        pieces = answers(text)
        yield next(piece for piece in pieces if piece)
        pieces.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "answers", lambda text: interrupted(text) if text == "hi" else answers(text))
    chat.talk(conversation)
    assert capsys.readouterr().out == "u ...\nuser\nh\n"
    assert [message["content"] for message in conversation.messages] == ["hi", "u", "more", "user\nh"]
