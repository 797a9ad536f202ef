"""The chat template that a user chooses: a Jinja file, or the built-in one."""

import copy
from pathlib import Path
from typing import Any

CHATML = (
    "{% if tools %}{{ raise_exception('the chatml template has no tools; give a template of your own') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}"
    "{{ raise_exception('the chatml template has no tool calls; give a template of your own') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, its answers marked. A turn ends with the tokenizer's eos token, <|im_end|> or not, so that generation ends there."""


def with_chat_template(tokenizer: Any, template: str) -> Any:
    """Returns a copy of the tokenizer with another chat template.

    Args:
      template: "chatml", or the path of a Jinja file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: "chatml" for a tokenizer without an eos token; or the file is empty or no UTF-8 text.
    """
    if template == "chatml" and tokenizer.eos_token is None:
        raise ValueError("chat_template='chatml' needs a tokenizer with an eos token to end turns with; this one has none")
    text = CHATML if template == "chatml" else Path(template).expanduser().read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"the chat template {template} is empty")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = text
    return tokenizer
