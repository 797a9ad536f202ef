"""Writes the tables of docs/performance.md from the measurements in benchmarks/results/*.jsonl.

Run it after a line was added or replaced.

A line is one claim: `claim`, `value` and `unit`, the comparison, date, device, versions, command, commit, and `log`,
the entry of docs/log/ that has the whole table. A new measurement replaces the line of its claim; the log keeps the old one.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = set("claim value unit compared_with compared_value date device versions command commit log note".split())
_TABLE = re.compile(r"(<!-- (\w+)\.jsonl -->\n\n)(?:\|.*\n)*")
_LINKS = re.compile(r"(<!-- links -->\n\n)(?:\[.*\n)*")


def page(text: str) -> str:
    """Returns the page `text` with the tables between its markers written anew."""
    logs = sorted({result["log"] for _, name in _TABLE.findall(text) for result in read(name)})
    text = _TABLE.sub(lambda found: found[1] + table(read(found[2]), logs), text)
    return _LINKS.sub(lambda found: found[1] + "".join(f"[{i}]: log/{log}\n" for i, log in enumerate(logs)), text)


def read(name: str) -> list[dict]:
    """Returns the results of benchmarks/results/NAME.jsonl.

    Raises:
        ValueError: a line lacks a field or has an unknown one.
    """
    results = []
    for number, line in enumerate((RESULTS / f"{name}.jsonl").read_text().splitlines(), 1):
        result = json.loads(line)
        wrong = FIELDS ^ result.keys()
        if wrong:
            raise ValueError(f"{name}.jsonl line {number}: missing or unknown fields {sorted(wrong)}")
        results.append(result)
    return results


def table(results: list[dict], logs: list[str]) -> str:
    """Returns a Markdown table, whose links are positions in `logs`."""
    lines = ["| what | moe_jax | compared with | date | GPU | program, log |", "|---|---|---|---|---|---|"]
    return "".join(f"{line}\n" for line in lines + [row(result, logs.index(result["log"])) for result in results])


def row(result: dict, log: int) -> str:
    """Returns the line of a table for one result."""
    value = f"{result['value']} {result['unit']}".rstrip()
    other = f"{result['compared_with']}: {result['compared_value']}" if result["compared_with"] else ""
    cells = result["claim"], value, other, result["date"], result["device"], f"[{program(result['command'])}][{log}]"
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def program(command: str) -> str:
    """Returns the benchmark, the subcommand or the function that a command line runs."""
    found = re.search(r"(\w+)\.py|moe-jax (\w+)|moe_jax\.(\w+)", command)
    return next(filter(None, found.groups())) if found else "script"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
