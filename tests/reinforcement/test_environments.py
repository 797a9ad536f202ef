"""Environments: dialogues as tokens, tools and their errors, games, limits."""

import json
import threading

import numpy as np
import pytest

from moe_jax.reinforcement import score
from moe_jax.reinforcement.environments import _message_tokens, play
from moe_jax.reinforcement.prompts import prompt_tokens, seed_of
from tests.helpers import tiny
from tests.helpers.groups import sample

ROW = {"prompt": [{"role": "user", "content": "Guess. "}], "secret": 3}
CALLING = (
    "{% if tools %}<|im_start|>tools{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Guess:
    """A number to guess with a tool."""

    closed = 0

    def reset(self, secret, **row):
        self.secret, self.found = secret, False
        return "From 1 to 9."

    def guess(self, number: int) -> str:
        """Compares a number with the secret one.

        Args:
            number: the number.
        """
        self.found |= number == self.secret
        return "found" if self.found else "higher" if number < self.secret else "lower"

    async def wait(self) -> str:
        """Waits."""
        return "error: an answer"

    def get_reward(self):
        return float(self.found)

    def close(self):
        type(self).closed += 1

    def _hidden(self):
        raise AssertionError


class Game:
    """A game without tools: it counts answers."""

    def reset(self, **row):
        self.answers = []

    def respond(self, text):
        self.answers.append(text)
        return f"reply {len(self.answers)}" if len(self.answers) < 3 else None


def call(name="guess", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def drawing(tokenizer, answers, reasons=()):
    """Returns a function that draws the given answers in turn, and a list of the calls (prompt, seed, max_new_tokens)."""
    seen, lock = [], threading.Lock()

    def draw(prompt, seed, max_new_tokens):
        with lock:
            number = max(0, tokenizer.decode(prompt).count("<|im_start|>assistant\n") - 1)
            seen.append((prompt, seed, max_new_tokens))
        tokens = tokenizer(answers[number] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        log_probs = np.arange(1, len(tokens) + 1, dtype=np.float32)
        reason = reasons[number] if number < len(reasons) else "stop"
        return sample(answers[number], tokens=np.asarray(tokens, np.int32), log_probs=log_probs, finish_reason=reason)

    return draw, seen


def played(environment, answers, *, template=CALLING, seeds=(5,), max_new_tokens=2000, row=ROW, reasons=(), **options):
    tokenizer = tiny.tokenizer(template)
    draw, seen = drawing(tokenizer, answers, reasons)
    sizes = dict(seeds=seeds, max_new_tokens=max_new_tokens)
    return play(7, row, environment, draw, tokenizer, **sizes, **options), seen, tokenizer


def test_a_dialogue_with_a_tool():
    answers = [f"I try 5. {call(number=5)}", call(number=3), "Done."]
    group, seen, tokenizer = played(Guess, answers)
    prompt = [{"role": "user", "content": "Guess. From 1 to 9."}]
    assert group.key == 7 and group.row == {**ROW, "prompt": prompt}
    assert tokenizer.decode(group.prompt_tokens).endswith("user\nGuess. From 1 to 9.<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "guess"' in tokenizer.decode(group.prompt_tokens) and "hidden" not in tokenizer.decode(group.prompt_tokens)
    (made,) = group.samples
    assert [turn["role"] for turn in made.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn["content"] for turn in made.turns] == [answers[0], "lower", answers[1], "found", answers[2]]
    assert (made.finish_reason, made.reward, made.tool_calls, made.tool_failures) == ("stop", 1.0, 2, 0)
    assert tokenizer.decode(made.tokens) == (
        f"{answers[0]}<|im_end|>\n<|im_start|>tool\nlower<|im_end|>\n<|im_start|>assistant\n"
        f"{answers[1]}<|im_end|>\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>"
    )
    assert [each[1] for each in seen] == [5, seed_of(5, 1), seed_of(5, 2)]
    assert score([group], [], environment="Guess")[0].rewards.tolist() == [[1]]


def test_each_turn_continues_the_tokens_before_it():
    group, seen, tokenizer = played(Guess, [call(number=1), call(number=2), "No."])
    made, prompt = group.samples[0], group.prompt_tokens.tolist()
    whole = prompt + made.tokens.tolist()
    assert all(whole[: len(each)] == each for each, _, _ in seen)
    assert [limit for _, _, limit in seen] == [2000 - (len(each) - len(prompt)) for each, _, _ in seen]
    assert made.own.dtype == bool and not made.log_probs[~made.own].any() and (made.log_probs[made.own] > 0).all()
    assert tokenizer.decode(made.tokens[made.own]) == f"{call(number=1)}<|im_end|>{call(number=2)}<|im_end|>No.<|im_end|>"
    assert made.reward == 0


@pytest.mark.parametrize(
    "text, error",
    [
        (call("guess", number="x"), "error: TypeError: '<' not supported"),
        (call("guess", size=1), "error: TypeError"),
        (call("_hidden"), "error: ValueError: there is no tool '_hidden'; the tools are guess, wait"),
        (call("get_reward"), "error: ValueError: there is no tool 'get_reward'"),
        ("<tool_call>{</tool_call>", "error: JSONDecodeError"),
        ("<tool_call>[1]</tool_call>", "error: TypeError"),
    ],
)
def test_errors_of_calls_are_messages(text, error):
    made = played(Guess, [text, "Sorry."])[0].samples[0]
    assert made.turns[1]["content"].startswith(error)
    assert (made.finish_reason, made.tool_calls, made.tool_failures) == ("stop", 1, 1)


def test_several_calls_of_an_answer():
    made = played(Guess, [call(number=1) + call("wait"), "Yes."])[0].samples[0]
    assert [turn["content"] for turn in made.turns[1:3]] == ["higher", "error: an answer"]
    assert made.tool_failures == 0, "a tool may speak of errors"


def test_calls_have_the_format_of_the_template():
    """Qwen3-Coder writes arguments as text; the tool's schema makes them numbers."""
    xml = "<tool_call>\n<function=guess>\n<parameter=number>\n5\n</parameter>\n</function>\n</tool_call>"
    answers = [xml, "<tool_call>\n<function=guess>\n</tool_call>", "Done."]
    made = played(Guess, answers, template=CALLING + "{#<function=#}")[0].samples[0]
    assert made.turns[1]["content"] == "lower" and made.turns[3]["content"].startswith("error: ValueError")
    assert (made.tool_calls, made.tool_failures) == (2, 1)


def test_calls_within_reasoning_are_not_made():
    made = played(Guess, [f"<think>{call(number=3)}</think>No call."])[0].samples[0]
    assert made.tool_calls == 0 and made.reward == 0


def test_a_game_without_tools():
    group, _, tokenizer = played(Game, ["a", "b", "c"], template=tiny.CHATML)
    (made,) = group.samples
    assert group.row["prompt"] == ROW["prompt"]
    assert [turn["content"] for turn in made.turns] == ["a", "reply 1", "b", "reply 2", "c"]
    assert "<|im_end|>\n<|im_start|>user\nreply 2<|im_end|>\n<|im_start|>assistant\nc<|im_end|>" in tokenizer.decode(
        made.tokens
    )
    assert made.reward is None


def test_a_template_that_drops_reasoning_keeps_the_tokens():
    """Qwen3's template writes an answer's reasoning only in the last turn; the dialogue keeps what was drawn."""
    for template in ("qwen3", "qwen3_instruct_2507", "qwen2_5"):
        answers = [f"<think>\nhm\n</think>\n\n{call(number=5)}", "<think>\n\n</think>\n\nNo."]
        group, _, tokenizer = played(Guess, answers, template=tiny.trl_template(template))
        assert tokenizer.decode(group.samples[0].tokens) == (
            f"{answers[0]}<|im_end|>\n<|im_start|>user\n<tool_response>\nlower\n</tool_response><|im_end|>\n"
            f"<|im_start|>assistant\n{answers[1]}<|im_end|>"
        )
        answers = ["<think>\nhm\n</think>\n\n<tool_call>{}</tool_call>", "b", "c"]
        group, _, tokenizer = played(Game, answers, template=tiny.trl_template(template))
        assert f"{answers[0]}<|im_end|>\n<|im_start|>user\nreply 1<|im_end|>\n" in tokenizer.decode(group.samples[0].tokens)


def test_tokens_are_those_of_the_whole_rendered_dialogue():
    """With a template that keeps answers as they are, the dialogue is what rendering all of its messages gives."""
    group, _, tokenizer = played(Game, ["a", "b", "c"], template=tiny.CHATML)
    whole = [*group.prompt_tokens, *group.samples[0].tokens]
    assert prompt_tokens(tokenizer, [*ROW["prompt"], *group.samples[0].turns, ROW["prompt"][0]])[: len(whole)] == whole


@pytest.mark.parametrize("template, error", [("-", "leaves the answer out"), ("{{ messages[1].content }}", "does not end one")])
def test_a_template_that_cannot_continue_is_an_error(template, error):
    broken = "{% if messages | length == 1 %}?{% else %}" + template + "{% endif %}"
    with pytest.raises(
        ValueError, match=f"chat template of the tokenizer cannot continue a dialogue after an answer: it {error}"
    ):
        played(Game, ["a", "b"], template=broken.replace("[1]", "[-2]"))


def test_limits_end_a_dialogue():
    made = played(Guess, [call(number=3)] * 9, max_turns=2)[0].samples[0]
    assert [turn["role"] for turn in made.turns] == ["assistant", "tool", "assistant"]
    assert (made.finish_reason, made.reward, made.tool_calls) == ("length", 1.0, 2)
    first = len(played(Guess, ["x" * 10])[0].samples[0].tokens)
    made, seen, _ = played(Game, ["x" * 10, "y"], max_new_tokens=first + 20)
    assert len(seen) == 1 and len(made.samples[0].tokens) == first and made.samples[0].finish_reason == "length"


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_an_answer_that_did_not_stop_ends_a_dialogue(reason):
    made = played(Guess, [call(number=3), call(number=3)], reasons=("stop", reason))[0].samples[0]
    assert made.finish_reason == reason and made.tool_calls == 1
    assert made.reward == (1.0 if reason == "length" else None)


@pytest.mark.parametrize("method", ["respond", "get_reward"])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_sample_whose_environment_raises_has_failed(method, value, caplog):
    class Broken(Game):
        pass

    def broken(self, *_):
        if method == "get_reward" and value is not None:
            return value
        raise OSError("no sandbox")

    setattr(Broken, method, broken)
    made = played(Broken, ["a", "b", "c"])[0].samples[0]
    assert made.finish_reason == "error" and made.reward is None
    assert method in caplog.text


def test_samples_play_at_once_in_environments_of_their_own():
    meeting = threading.Barrier(3, timeout=20)

    class Meeting(Game):
        def respond(self, text):
            meeting.wait()
            return super().respond(text)

    group = played(Meeting, ["a", "b", "c"], seeds=(1, 2, 3))[0]
    assert [each.seed for each in group.samples] == [1, 2, 3]
    assert all(len(each.turns) == 5 for each in group.samples)


def test_environments_are_closed_also_after_an_error():
    Guess.closed = 0
    played(Guess, ["a"], seeds=(1, 2))
    assert Guess.closed == 2
    with pytest.raises(IndexError):
        played(Guess, [], seeds=(1, 2))
    assert Guess.closed == 4


def test_bad_rows_and_options():
    with pytest.raises(ValueError, match="needs prompts of messages; the prompt 7 is the text 'Guess!'"):
        played(Guess, ["a"], row={"prompt": "Guess!", "secret": 3})
    with pytest.raises(ValueError, match="max_turns must be at least 1; got 0"):
        played(Guess, ["a"], max_turns=0)
    texts = iter("ab")
    different = type("Different", (), {"reset": lambda self, **row: next(texts)})
    with pytest.raises(ValueError, match="reset must return one text for the samples of a prompt; prompt 7 has"):
        played(different, ["a"], seeds=(1, 2))


@pytest.mark.parametrize(
    "name, end, before",
    [
        ("gptoss", "<|call|>", "<|start|>functions.guess to=assistant"),
        ("llama3_1", "<|eot_id|>", "<|start_header_id|>ipython"),
        ("glm4moe", "<|observation|>", "\n<tool_response>"),
        ("qwen3_6", "<|im_end|>", "\n<|im_start|>user\n<tool_response>"),
    ],
)
def test_tools_in_templates_of_other_models(name, end, before):
    """The call of the answer is the model's own, and only what comes after its end is added."""
    tokenizer = tiny.tokenizer(tiny.trl_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    messages = [{"role": "tool", "name": "guess", "content": "lower"}]
    added = _message_tokens(tokenizer, None, messages, [tokenizer.convert_tokens_to_ids(end)])
    text = tokenizer.decode(added)
    assert text.startswith(before) and "lower" in text and "answer-" not in text


def test_an_end_token_after_the_message_is_no_end_of_the_answer():
    tokenizer = tiny.tokenizer(tiny.trl_template("gptoss"))
    messages = [{"role": "tool", "name": "guess", "content": "lower"}]
    with pytest.raises(ValueError, match="does not end one with the token 1"):
        _message_tokens(tokenizer, None, messages, [1])
