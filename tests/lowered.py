"""What a lowered program does, read off its text."""

import re


def num_kernels(text: str) -> int:
    """Hopper kernels that a program launches; what a function launches counts with each call of it, a loop's body once."""
    functions = dict(re.findall(r"func\.func \w+ @([\w.]+)\((.*?)\n  }\n", text, re.DOTALL))

    def launches(body: str) -> int:
        called = re.findall(r"\bcall @([\w.]+)\(", body)
        return body.count("custom_call @mosaic_gpu") + sum(launches(functions[name]) for name in called)

    return launches(functions["main"])
