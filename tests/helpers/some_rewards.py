"""Reward functions that processes import by their place."""

import os
import signal
import subprocess
import threading
import time


def of_names(prompts, completions, completion_ids, answer, seeds, finish_reasons, log_extra, log_metric, wait=None, **columns):
    """Checks that what belongs together is together, and returns a number of it, after the row's time."""
    time.sleep(wait[0] if wait else 0)
    rewards = []
    for prompt, completion, ids, key, seed in zip(prompts, completions, completion_ids, answer, seeds, strict=True):
        assert prompt == f"prompt {key}" and seed // 100 == key and "".join(map(chr, ids)) == completion
        rewards.append(key + len(completion) / 8 + seed % 100 / 1024)
    log_extra("number", seeds)
    log_metric("first", seeds[0])
    return rewards


async def of_names_async(**keywords):
    import asyncio

    await asyncio.sleep(keywords.pop("wait", [0])[0])
    return of_names(**keywords)


def process(completions, **columns):
    """Returns the number of the process that calls it."""
    return [os.getpid()] * len(completions)


def in_main_thread(completions, **columns):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [threading.current_thread() is threading.main_thread()] * len(completions)


def hangs(completions, answer, **columns):
    """Ignores signals and leaves a child behind, whose number it writes into the file `answer`."""
    child = subprocess.Popen(["sleep", "600"])
    with open(answer[0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def raises(completions, **columns):
    raise KeyError("no such thing")


def exits(completions, **columns):
    os._exit(3)


def leaves(completions, **columns):
    raise SystemExit(2)


def logs_a_lock(completions, log_extra, **columns):
    log_extra("lock", [threading.Lock()] * len(completions))
    return [0.0] * len(completions)


def is_nan(completions, **columns):
    return [0.0, float("nan")]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Verl's signature."""
    return {"score": solution_str == ground_truth, "source": data_source, "index": extra_info["index"]}


A_CONSTANT = 3


def is_running(process):
    """Returns True if a process has not ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
