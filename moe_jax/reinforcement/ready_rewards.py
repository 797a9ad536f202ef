"""Ready reward functions, with TRL's signature.

Functions that compare read the wanted answer from the column `answer`, `solution` or `ground_truth`, or from verl's
`reward_model`. A chat's answer is the assistant's last message.
"""

import ast
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.reinforcement.reward_calls import ground_truth, text_of

READY = ("exact", "contains", "matches", "is_json", "python_parses", "math")
"""Names that `load_reward` accepts."""


def exact(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Returns 1 for an answer that equals the wanted one; spaces around both do not count."""
    return [float(text_of(each).strip() == str(answer).strip()) for each, answer in _pairs(completions, columns)]


def contains(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Returns 1 for an answer that contains the wanted one."""
    return [float(str(answer).strip() in text_of(each)) for each, answer in _pairs(completions, columns)]


def matches(completions: Sequence[Any], pattern: Sequence[str], **columns: Any) -> list[float]:
    """Returns 1 for an answer in which the regular expression of the column `pattern` is found; `.` matches newlines."""
    return [
        float(re.search(regex, text_of(each), re.DOTALL) is not None) for each, regex in zip(completions, pattern, strict=True)
    ]


def is_json(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Returns 1 for an answer that is JSON, perhaps in a fenced block."""
    return [float(_is_read(json.loads, _unfenced(text_of(each)))) for each in completions]


def python_parses(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Returns 1 for an answer that is Python code, perhaps in a fenced block; it is not run."""
    return [float(bool(code := _unfenced(text_of(each))) and _is_read(ast.parse, code)) for each in completions]


def math(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""Returns 1 for an answer that equals the wanted one as mathematics; needs the package math-verify.

    The answer is the last formula or number, such as `\boxed{1/2}`. A wanted answer that cannot be read gives None.

    Raises:
      ImportError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("the reward `math` is computed by the package math-verify: pip install math-verify") from error
    # Its time limit is an alarm, which raises an error in other threads; math-verify hides the error, and finds nothing.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    rewards: list[float | None] = []
    for each, answer in _pairs(completions, columns):
        wanted = parse(str(answer), parsing_timeout=limit) or parse(f"${answer}$", parsing_timeout=limit)
        found = parse(text_of(each), parsing_timeout=limit)
        rewards.append(float(verify(wanted, found, timeout_seconds=limit)) if wanted else None)
    return rewards


def _pairs(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[tuple[Any, Any]]:
    """Returns each completion with its wanted answer."""
    found = next((columns[name] for name in ("answer", "solution", "ground_truth") if name in columns), None)
    if found is None and "reward_model" in columns:
        found = [ground_truth(each) for each in columns["reward_model"]]
    if found is None or any(answer is None for answer in found):
        raise ValueError(
            "needs the wanted answer in the column answer, solution or ground_truth, or in verl's reward_model; the row has "
            f"{', '.join(columns)}"
        )
    return list(zip(completions, found, strict=True))


def _unfenced(text: str) -> str:
    """Returns the last fenced block of a text, or the whole text."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return (blocks[-1] if blocks else text).strip()


def _is_read(read: Any, text: str) -> bool:
    try:
        read(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
