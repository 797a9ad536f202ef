"""Times the host's work of a serving step: the plan, and the tokens of the step before. No GPU is needed.

    python benchmarks/engine_host.py --sequences 1 64 256

Each sequence has a prompt of `--prompt` tokens and decodes; a step is planned before the step before is read, as the engine
does. The tokens come from no device. Printed are CPU microseconds of a step in which all sequences decode: the median, and the
99th percentile. The time of arrays, uploads, text and delivery is not in it. `admit` is the plan of one more prompt, hashed
and chunked, beside sequences that decode.
"""

import argparse
import time

import numpy as np

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.schedule import EngineQueues, Sequence, finish, plan_step, read_step


def main() -> None:
    """Prints a row for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(f"{'sequences':>9} {'plan us':>16} {'read us':>16} {'both us':>16} {'admit us':>16}")
    for sequences in args.sequences:
        plan, read, admit = times(sequences, args.prompt, args.steps)
        cells = (f"{np.median(each):8.1f} ({np.percentile(each, 99):.0f})" for each in (plan, read, plan + read, admit))
        print(f"{sequences:>9} " + " ".join(f"{cell:>16}" for cell in cells))


def times(sequences: int, prompt: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the microseconds of each plan, of each reading, and of plans that admit one more prompt."""
    length = prompt + steps + 2 * PAGE_SIZE
    limits = EngineLimits(
        max_sequences=sequences + 1,
        max_tokens_per_step=8192,
        max_length=length,
        num_pages=1 + (sequences + 2) * pages_of(length),
    )
    queues, rng = EngineQueues(limits), np.random.default_rng(0)
    options = SamplingOptions(max_new_tokens=length - prompt)

    def add() -> Sequence:
        queues.waiting.append(Sequence(rng.integers(1000, size=prompt).tolist(), options, ends=frozenset([1000])))
        return queues.waiting[-1]

    for _ in range(sequences):
        add()
    unread, plans, reads, admits = None, [], [], []
    while len(plans) < steps:
        # Every 50th step one more prompt comes; it leaves after its first token.
        guest = add() if unread and len(unread[0].decodes) == sequences and len(plans) % 50 == 25 else None
        began = time.thread_time()
        plan = plan_step(queues)
        planned = time.thread_time()
        tokens = [[len(plans) % 1000]] * len(plan.samples)
        before = time.thread_time()
        if unread:
            read_step(queues, *unread)
        after = time.thread_time()
        unread = plan, tokens
        if guest:
            admits.append(planned - began)
            finish(queues, guest, "abort")
        if len(plan.decodes) == sequences:
            plans.append(planned - began)
            reads.append(after - before)
    return 1e6 * np.array(plans), 1e6 * np.array(reads), 1e6 * np.array(admits)


if __name__ == "__main__":
    main()
