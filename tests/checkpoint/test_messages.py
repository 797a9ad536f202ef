"""Instructions of developers and systems are in the text, in the form that the chat template writes, or are refused."""

import pytest

from moe_jax.generation.text import chat_prompts
from moe_jax.train.data.chat import chat_tokens
from tests.helpers import tiny

SYSTEM, DEVELOPER = {"role": "system", "content": "be kind"}, {"role": "developer", "content": "speak French"}
TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "salut"}]
# Qwen's templates have branches like these, and no other role.
BRANCHES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# DeepSeek-R1's template writes the last of several.
LAST = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
    "system: {{ ns.s }}\n" + BRANCHES.replace("'system', ", "")
)
STRICT = (
    "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('one system') }}{% endif %}"
    + BRANCHES
)
NONE = BRANCHES.replace("'system', ", "")


@pytest.mark.parametrize(
    "template, messages, begin",
    [
        (
            tiny.CHATML,
            [SYSTEM, DEVELOPER],
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>developer\nspeak French<|im_end|>",
        ),
        (BRANCHES, [DEVELOPER], "<|im_start|>system\nspeak French<|im_end|>"),
        (
            BRANCHES,
            [*TURN, DEVELOPER],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nsalut<|im_end|>\n<|im_start|>system",
        ),
        (STRICT, [SYSTEM, DEVELOPER], "<|im_start|>system\nbe kind\n\nspeak French<|im_end|>"),
        (LAST, [SYSTEM, DEVELOPER], "system: be kind\n\nspeak French\n"),
        (LAST, [SYSTEM, {"role": "system", "content": "be brief"}], "system: be kind\n\nbe brief\n"),
    ],
)
def test_a_developers_message_is_written_as_the_template_can(template, messages, begin):
    tokenizer = tiny.tokenizer(template)
    tokens, learned = chat_tokens(tokenizer, [*messages, *TURN])
    assert tokenizer.decode(tokens).startswith(begin) and tokenizer.decode(tokens[learned]).endswith("salut<|im_end|>")
    (prompt,) = chat_prompts(tokenizer, [[*messages, TURN[0]]])
    assert tokenizer.decode(prompt).startswith(begin)


@pytest.mark.parametrize("template, messages", [(NONE, [DEVELOPER, *TURN]), (LAST, [SYSTEM, *TURN, DEVELOPER, *TURN])])
def test_lost_instructions_are_refused(template, messages):
    with pytest.raises(
        ValueError, match=r"the chat template would leave out one of the messages .*\(developer\); give one system"
    ):
        chat_tokens(tiny.tokenizer(template), messages)


def test_a_template_that_refuses_systems_is_quoted():
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}" + NONE
    with pytest.raises(ValueError, match="the tokenizer's chat template refuses the conversation: no system"):
        chat_prompts(tiny.tokenizer(template), [[DEVELOPER, TURN[0]]])
