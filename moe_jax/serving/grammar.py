"""Grammars of new text: JSON by a schema, a regular expression, one of several texts, calls of tools, or any grammar.

A grammar is a text in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), whose
rule `start` is the whole text. It needs the package llguidance: `pip install 'moe_jax[grammar]'`.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from moe_jax.generation.tool_calls import END_OF_THOUGHT, THINK, CallFormat

MISSING = "a grammar needs the package llguidance: pip install 'moe_jax[grammar]'"

KEPT_GRAMMARS = 64
"""Number of compiled grammars that an engine keeps: clients send the same one with each request."""

_JSON = "start: %json "


def json_grammar(schema: Any = None) -> str:
    """Returns the grammar of JSON that a schema describes, its properties in the schema's order; None: any object."""
    return _JSON + json.dumps({"type": "object"} if schema is None else schema)


def regex_grammar(pattern: str) -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole, in the syntax of Rust's regex crate."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.S).replace("\n", r"\n")
    return f"start: /{escaped}/"


def choice_grammar(texts: Sequence[str]) -> str:
    """Returns the grammar of these texts.

    Raises:
      ValueError: there is none.
    """
    if not texts:
        raise ValueError("a choice must have at least one text")
    return "start: " + " | ".join(map(json.dumps, texts))


def free_grammar(text: str) -> str:
    """Returns a grammar in Lark from one in Lark or in GBNF, whose first rule is `root`.

    Raises:
      ValueError: llguidance is not installed, or cannot read the grammar.
    """
    if "::=" not in text:
        return text
    if not is_installed():
        raise ValueError(MISSING)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the parser has errors of its own
        raise ValueError(f"the grammar cannot be read: {error}") from error


def calls_grammar(tokenizer: Any, calls: CallFormat, schemas: Mapping[str, Any], *, one: bool = False) -> str:
    """Returns the grammar of calls of these tools, with arguments by their schemas.

    Args:
      schemas: the schemas of the tools' parameters, by name.
      one: True allows a single call, not several.
    """
    rules = [
        "start: call" if one else 'start: call ("\\n" call)*',
        "call: " + " | ".join(f"call{i}" for i in range(len(schemas))),
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        begin, end = literal(tokenizer, calls.begin + calls.before(name)), literal(tokenizer, calls.after + calls.end)
        if calls.parameter is None:
            rules.append(f'call{i}: {begin} " "? args{i} {end}\nargs{i}: %json {json.dumps({"type": "object"} | schema)}')
            continue
        parts = []
        for number, (key, of_key) in enumerate(schema.get("properties", {}).items()):
            rule, (before, after) = f"value{i}_{number}", calls.parameter
            value, definition = _until(tokenizer, rule, after)
            if of_key.get("type", "string") != "string":
                value, definition = f"{rule} {literal(tokenizer, after)}", f"{rule}: %json {json.dumps(of_key)}"
            parts.append(
                f"({literal(tokenizer, before.format(key=key))} {value})" + "?" * (key not in schema.get("required", ()))
            )
            rules.append(definition)
        rules.append(f"call{i}: {' '.join([begin, *parts, end])}")
    return "\n".join(rules)


def answer_grammar(tokenizer: Any, texts: Sequence[str], thinks: bool | None) -> str:
    """Returns the grammar of one of some texts, given by their grammars, after a thought.

    Args:
      thinks: True: a thought has begun; False: it may begin; None: there is none.
    """
    value, rule = _until(tokenizer, "thought", END_OF_THOUGHT)
    begin = {True: value, False: f"({literal(tokenizer, THINK)} {value})?", None: ""}[thinks]
    choices = " | ".join(f"@text{i}" for i in range(len(texts)))
    # Models write empty lines after a thought.
    whole = f"start: {begin} {'' if thinks is None else SPACE} ({choices})\n{'' if thinks is None else rule}"
    parts = [("answer", whole), *((f"text{i}", text) for i, text in enumerate(texts))]
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in parts]})


SPACE = "/[ \\n]{0,4}/"


def literal(tokenizer: Any, text: str) -> str:
    """Returns the grammar of exactly this text. Added tokens in it, such as <tool_call>, are written as their ids."""
    added = {each.content: token for token, each in tokenizer.added_tokens_decoder.items()}
    names = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if added else [text]
    return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part)


def _until(tokenizer: Any, rule: str, end: str) -> tuple[str, str]:
    """Returns the grammar of any text up to an end, with the end, and the definition of the rule that it needs."""
    written = literal(tokenizer, end)
    if "<[" in written:
        # No text contains an added token.
        return f"/(?s:.*)/ {written[written.index('<[') :]}", ""
    return rule, f"{rule}[suffix={written}]: /(?s:.*)/"


class Grammars:
    """Compiles grammars for a tokenizer.

    Raises:
      ValueError: llguidance is not installed, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        if not is_installed():
            raise ValueError(MISSING)
        import llguidance.hf

        try:
            self._of_rust = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size)
        except Exception as error:  # Rust's errors have no class of their own
            raise ValueError(f"llguidance does not support the tokenizer: {error}") from error
        self._vocab_size, self.compiled = vocab_size, functools.lru_cache(KEPT_GRAMMARS)(self._compile)

    def matcher(self, grammar: str) -> "Matcher":
        """Returns a matcher at the beginning of a grammar, for a new text.

        Raises:
          ValueError: the grammar cannot be compiled; the message names the place.
        """
        return Matcher(self.compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._of_rust, grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar))
        if not compiled.is_error():
            return compiled
        # The lines after the reason are a copy of the grammar.
        reason = " ".join(re.split(r"\n\s*\d+ \| ", compiled.get_error())[0].split())[:300]
        if not grammar.startswith(_JSON):
            raise ValueError(f"the grammar cannot be compiled: {reason}")
        place = self._wrong_place(json.loads(grammar.removeprefix(_JSON)), "")
        raise ValueError(f"the JSON schema cannot be compiled{place and ' at ' + place}: {reason.rpartition('schema: ')[2]}")

    def _wrong_place(self, schema: Any, place: str) -> str:
        """Returns the place of the smallest part of a schema that cannot be compiled."""
        for name, part in _parts(schema):
            try:
                self._compile(json_grammar({key: schema[key] for key in _NAMED if key in schema} | part))
            except ValueError:
                return self._wrong_place(part, f"{place}.{name}".lstrip("."))
        return place


def is_installed() -> bool:
    """Returns True if grammars can be compiled."""
    return importlib.util.find_spec("llguidance") is not None


class Matcher:
    """A grammar in the middle of a text.

    Attributes:
      bits: the tokens that may come next, as `Constraint.bits`; none after an error.
      has_ended: True after an end token of the tokenizer, which the sequence may lack among its own.
      of_rust: llguidance's matcher.
      vocab_size: the number of tokens that the model draws from.
    """

    bits: UInt32[np.ndarray, " words"]

    def __init__(self, matcher: Any, vocab_size: int):
        self.of_rust, self.has_ended, self.vocab_size = matcher, False, vocab_size
        _find_bits([self])

    @property
    def is_complete(self) -> bool:
        """True where the text may end."""
        return self.of_rust.is_accepting()


def commit(texts: Sequence[tuple[Matcher, int]]) -> None:
    """Adds its next token to each text, and finds the tokens after it, on all cores of the host."""
    from llguidance.numpy import consume_token_par

    for matcher, _ in texts:
        # Where no text may follow, the next token can only end it.
        matcher.has_ended = matcher.of_rust.is_stopped()
    consume_token_par(_executor(), [(matcher.of_rust, token) for matcher, token in texts])
    for matcher, _ in texts:
        matcher.has_ended |= matcher.of_rust.stop_reason() == "EndOfSentence"
    _find_bits([matcher for matcher, _ in texts if not matcher.has_ended])


def _find_bits(matchers: Sequence[Matcher]) -> None:
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    if not matchers:
        return
    rows = allocate_token_bitmask(len(matchers), matchers[0].vocab_size)
    fill_next_token_bitmask_par(_executor(), [(matcher.of_rust, row) for row, matcher in enumerate(matchers)], rows)
    for matcher, row in zip(matchers, rows.view(np.uint32), strict=True):
        matcher.bits = np.zeros_like(row) if matcher.of_rust.is_error() else row


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


_NAMED = "$defs", "definitions"
"""Keywords of schemas that other parts of a schema refer to by name."""


def _parts(schema: Any) -> Iterator[tuple[str, dict]]:
    """Yields the schemas directly inside a schema, and their places."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in ("properties", "patternProperties", *_NAMED) and isinstance(value, dict):
            yield from ((f"{name}.{key}", each) for key, each in value.items() if isinstance(each, dict))
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, dict))
        elif name in ("items", "additionalProperties") and isinstance(value, dict):
            yield name, value
