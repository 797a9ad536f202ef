"""The chat template that a user chooses: a Jinja file, or one of the built-in ones, which mark answers for training."""

import copy
import re
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
"""ChatML with marked answers. A turn ends with the tokenizer's eos token, <|im_end|> or not, to end generation."""


_REASONING = r"""
{%- set content = message.content or '' -%}
{%- set reasoning = message.reasoning_content or message.reasoning or message.thinking or '' -%}
{%- if not reasoning and '</think>' in content -%}
  {%- set reasoning = content.partition('</think>')[0].split('<think>')[-1] -%}
  {%- set content = content.partition('</think>')[2] -%}
{%- endif -%}"""
"""Sets `reasoning` and `content` of an answer, whose content may hold both."""
_DEEPSEEK = r"""
{{- bos_token -}}
{%- for message in messages if message.role in ['system', 'developer'] -%}
  {{- ('' if loop.first else '\n\n') + message.content -}}
{%- endfor -%}
{%- if tools -%}
  {{- '\n\n## Tools\n\nThese functions can be called:' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {%- set after_tool = not loop.first and loop.previtem.role == 'tool' -%}
  {%- if message.role == 'user' -%}
    {{- '<｜User｜>' + message.content -}}
  {%- elif message.role == 'tool' -%}
    {{- '' if after_tool else '<｜tool▁outputs▁begin｜>' -}}
    {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {{- '' if not loop.last and loop.nextitem.role == 'tool' else '<｜tool▁outputs▁end｜>' -}}
  {%- elif message.role == 'assistant' -%}
    REASONING
    {%- set opening = '<think>\n' if reasoning else '' -%}
    {%- set is_prompted = not after_tool and PROMPT_THINKS -%}
    {{- ('' if after_tool else '<｜Assistant｜>') + (opening if is_prompted else '') -}}
    {%- generation -%}
    {{- '' if is_prompted else opening -}}
    {{- reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') if reasoning else content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set call = call.function or call -%}
      {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' -}}
      {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\n```json\n' -}}
      {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
      {{- '\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') -}}
    {%- endfor -%}
    {{- '<｜end▁of▁sentence｜>' -}}
    {%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}
  {{- '<｜Assistant｜>' + ('<think>\n' if PROMPT_THINKS else '') -}}
{%- endif -%}""".replace("REASONING", _REASONING)
"""The format of DeepSeek-V3 and R1, whose prompt begins the reasoning. After a tool's output an answer has no header."""
_KIMI = r"""
{%- if tools -%}
  {{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' -}}
{%- endif -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' -}}
{%- endif -%}
{%- set calls = namespace(number=0, unanswered=[]) -%}
{%- for message in messages -%}
  {%- set name = message.name or message.role -%}
  {%- if message.role == 'assistant' -%}
    REASONING
    {{- '<|im_assistant|>' + name + '<|im_middle|>' -}}
    {%- generation -%}
    {{- ('<think>' + reasoning + '</think>' if reasoning or ALWAYS_THINKS else '') + content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- set id = call.id or 'functions.' ~ function.name ~ ':' ~ calls.number -%}
      {%- set calls.number = calls.number + 1 -%}
      {%- set calls.unanswered = calls.unanswered + [id] -%}
      {{- ('<|tool_calls_section_begin|>' if loop.first else '') + '<|tool_call_begin|>' + id -}}
      {{- '<|tool_call_argument_begin|>' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- ('<|im_user|>' if message.role == 'user' else '<|im_system|>') + name + '<|im_middle|>' -}}
    {%- if message.role == 'tool' -%}
      {{- '## Return of ' + (message.tool_call_id or calls.unanswered[0] or name) + '\n' -}}
      {%- set calls.unanswered = calls.unanswered[1:] -%}
    {%- endif -%}
    {{- message.content + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' -}}""".replace("REASONING", _REASONING)
"""The format of Kimi K2. K2-Thinking writes a think block into each answer, empty if there is no reasoning."""
TEMPLATES = {
    "chatml": CHATML,
    "deepseek-v3": _DEEPSEEK.replace("PROMPT_THINKS", "false"),
    "deepseek-r1": _DEEPSEEK.replace("PROMPT_THINKS", "true"),
    "kimi-k2": _KIMI.replace("ALWAYS_THINKS", "false"),
    "kimi-k2-thinking": _KIMI.replace("ALWAYS_THINKS", "true"),
}
"""Built-in templates by name. They keep the reasoning of each answer."""
_KEEPING = {"<｜Assistant｜>": "deepseek-r1", "<|im_middle|>": "kimi-k2-thinking"}
"""{a token that identifies a family of models: its template that keeps reasoning}."""
_TOKENS_OF_TURNS = re.compile(r"<[|｜](?!tool)[^|｜]+[|｜]>")


def with_chat_template(tokenizer: Any, template: str) -> Any:
    """Returns a copy of the tokenizer with another chat template.

    Args:
      template: a name in TEMPLATES, or the path of a Jinja file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: "chatml" for a tokenizer without an eos token, or the template of a family without its tokens.
        Or the file is empty or not UTF-8 text.
    """
    if template == "chatml" and tokenizer.eos_token is None:
        raise ValueError("chat_template='chatml' needs a tokenizer with an eos token to end turns with; this one has none")
    text = TEMPLATES[template] if template in TEMPLATES else Path(template).expanduser().read_text(encoding="utf-8")
    if template in TEMPLATES and template != "chatml":
        missing = sorted(set(_TOKENS_OF_TURNS.findall(text)) - set(tokenizer.get_vocab()))
        if missing:
            raise ValueError(f"chat_template={template!r} needs a tokenizer with the tokens {', '.join(missing)}")
    if not text.strip():
        raise ValueError(f"the chat template {template} is empty")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = text
    return tokenizer


def keeping_template(template: str) -> str:
    """Returns ", such as --chat-template NAME" if the template's family has a built-in one, else ""."""
    return next((f", such as --chat-template {name}" for token, name in _KEEPING.items() if token in template), "")
