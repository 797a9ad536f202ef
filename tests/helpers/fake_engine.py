"""An engine without a model: it answers with the prompt's own tokens, a token of each request in a step."""

import functools
import threading
import time
from types import SimpleNamespace
from typing import Any

from moe_jax.serving.grammar import Grammars
from moe_jax.serving.handle import Delivery, Handle, wake
from moe_jax.serving.loop import QueueFull, Stats
from moe_jax.serving.request import Completion, EngineLimits, SamplingOptions, checked
from tests.helpers import tiny

VOCAB, END = 264, 0
LIMITS = EngineLimits(max_sequences=64, max_tokens_per_step=64, max_length=512, num_pages=64, max_waiting=64)


class FakeEngine:
    """Has the engine's interface. A prompt's tokens are its answer, again and again, and then an end token.

    `repeats`: times that the prompt comes; `step_seconds`: the time of a step; `says`: a text that it answers instead.
    """

    def __init__(self, limits: EngineLimits = LIMITS, *, repeats: int = 1, step_seconds: float = 0.0, tokenizer: Any = None):
        self.limits = limits
        self.tokenizer = tiny.tokenizer() if tokenizer is None else tokenizer
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.lazy = False
        self.submitted: list[SamplingOptions] = []
        self.handles: list[Handle] = []
        self.closed = False
        self.error: Exception | None = None
        self.repeats = repeats
        self.step_seconds = step_seconds
        self.says: str | None = None
        self.calls: list[str] = []
        self.adapters: list[Any] = []
        self._active: dict[_Sequence, Handle] = {}
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        return self.limits.max_sequences + self.limits.max_waiting

    @functools.cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, VOCAB)

    def submit(self, prompt, options=None) -> Handle:
        ids = checked(prompt, options, self.limits, VOCAB)
        if self.error is not None:
            raise RuntimeError("the engine failed")
        with self._lock:
            if len(self._active) >= self.capacity:
                raise QueueFull(f"{len(self._active)} sequences run or wait")
            answer = ids * self.repeats if self.says is None else self.tokenizer(self.says)["input_ids"]
            sequences = [_Sequence(number, answer + [END], options) for number in range(options.n)]
            handle = Handle(ids, options, lambda numbers: self._abort([sequences[i] for i in numbers]), self.tokenizer)
            if (wanted := options.prompt_logprobs) is not None:
                handle.prompt_logprobs += [{token: -0.25 * token} | ({5: -9.0} if wanted else {}) for token in ids[1:]]
            self._active |= dict.fromkeys(sequences, handle)
        self.submitted.append(options)
        self.handles.append(handle)
        return handle

    def load_adapter(self, name, adapter) -> None:
        if adapter == "missing":
            raise FileNotFoundError("there is no folder missing")
        if adapter == "no place":
            raise RuntimeError("running requests use all adapters")
        self.adapters = [*(each for each in self.adapters if each.name != name), SimpleNamespace(name=name, source=adapter)]

    def unload_adapter(self, name) -> None:
        self.adapters = [each for each in self.adapters if each.name != name]

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def drop_prefixes(self) -> None:
        self.calls.append("drop_prefixes")

    def update(self, model) -> None:
        self.calls.append(f"update {model}")

    def stats(self) -> Stats:
        running = min(len(self._active), self.limits.max_sequences)
        zeros = dict.fromkeys(Stats._fields, 0)
        return Stats(**zeros | dict(running=running, waiting=len(self._active) - running, num_tokens=self._num_tokens))

    def stats_of_devices(self) -> dict[str, Stats]:
        return {}

    def close(self, *, drain: bool = True) -> None:
        self.closed = True
        self._thread.join()

    @property
    def failed(self) -> bool:
        return self.error is not None

    def fail(self) -> None:
        """Makes the engine fail at the next step."""
        self.error = ValueError("a defect")

    def _run(self) -> None:
        while not self.closed:
            time.sleep(max(self.step_seconds, 0.0005))
            listeners = set()
            with self._lock:
                for sequence, handle in list(self._active.items())[: self.limits.max_sequences]:
                    if self.error is not None:
                        listeners.add(handle.fail(self.error))
                    else:
                        listeners.add(handle.deliver(*sequence.step(handle)))
                        self._num_tokens += 1
                    if self.error is not None or handle.completions[sequence.number] is not None:
                        del self._active[sequence]
            wake(listeners - {None})

    def _abort(self, sequences: list["_Sequence"]) -> None:
        with self._lock:
            for sequence in sequences:
                handle = self._active.pop(sequence, None)
                if handle is not None:
                    wake({handle.deliver(*sequence.end(handle, None, "abort"))} - {None})


class _Sequence:
    def __init__(self, number: int, tokens: list[int], options: SamplingOptions):
        self.number, self.tokens, self.options = number, tokens, options
        self.done: list[int] = []

    def step(self, handle: Handle) -> Delivery:
        token = self.tokens[len(self.done) % len(self.tokens)]
        self.done.append(token)
        is_end = token in self.options.stop_token_ids
        if is_end or len(self.done) == self.options.max_new_tokens:
            return self.end(handle, token, "stop" if is_end else "length")
        return self._event(token, None)

    def end(self, handle: Handle, token: int | None, reason) -> Delivery:
        handle.completions[self.number] = Completion(self.done, reason, cached_tokens=1)
        return self._event(token, reason)

    def _event(self, token, reason) -> Delivery:
        if token is None:
            return self.number, [], reason
        wanted = self.options.logprobs
        return self.number, [(token, -0.25 * token, {token: -0.25 * token, 5: -9.0} if wanted else None)], reason
