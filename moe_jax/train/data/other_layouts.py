"""Common layouts of fine-tuning data that are not read as they are: recognized, to print the lines that convert them."""

import json
from pathlib import Path
from typing import Any

_ALPACA = """\
ask = row["instruction"] + ("\\n\\n" + row["input"] if row.get("input") else "")
chat = {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": row["output"]}]}"""
_SHAREGPT = """\
roles = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}
chat = {"messages": [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]}"""
_PAIR = """\
chat = {"messages": [{"role": "user", "content": row["ASK"]}, {"role": "assistant", "content": row["ANSWER"]}]}"""

_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))


def how_to_convert(file: Path) -> str | None:
    """Returns Python code that writes chats from `file`, rows of JSON a line or in a list; None if no layout is known."""
    with open(file, "rb") as handle:
        head = handle.read(1 << 20).decode("utf-8-sig", errors="replace")
    is_list = head.lstrip().startswith("[")
    row = _first_row(head)
    if not isinstance(row, dict) or "text" in row or ("messages" in row and not is_list):
        return None
    layout = _layout(row)
    if layout is None:
        return None
    name, code = layout
    unused = [] if name == "chat" else [key for key in row if f'"{key}"' not in code]
    left_out = f" (without {', '.join(unused)})" if unused else ""
    # Not a file that may be the source itself.
    target = "chats.jsonl" if file.name != "chats.jsonl" else "converted.jsonl"
    rows = "json.load(source)" if is_list else "map(json.loads, filter(str.strip, source))"
    return (
        f"This is {name} data. To convert it to chats{left_out}:\n\n"
        "import json\n\n"
        f"with open({str(file)!r}, encoding='utf-8-sig') as source, open({target!r}, 'w') as target:\n"
        f"    for row in {rows}:\n"
        + "".join(f"        {line}\n" for line in code.splitlines())
        + '        target.write(json.dumps(chat) + "\\n")'
    )


def _layout(row: dict[str, Any]) -> tuple[str, str] | None:
    """The layout's name, and the code that makes `chat`, a line of the new file, of the dictionary `row`."""
    if "instruction" in row and "output" in row:
        return "Alpaca", _ALPACA
    if isinstance(turns := row.get("conversations"), list) and turns and isinstance(turns[0], dict):
        return ("ShareGPT", _SHAREGPT) if "from" in turns[0] else ("chat", 'chat = {"messages": row["conversations"]}')
    for ask, answer in _PAIRS:
        if isinstance(row.get(ask), str) and isinstance(row.get(answer), str):
            return f"{ask}/{answer}", _PAIR.replace("ASK", ask).replace("ANSWER", answer)
        if isinstance(row.get(ask), list) and isinstance(row.get(answer), list):
            return f"{ask}/{answer}", f'chat = {{"messages": row["{ask}"] + row["{answer}"]}}'
    return ("chat", "chat = row") if "messages" in row else None


def _first_row(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    except (ValueError, RecursionError):
        return None
