"""Text that comes token by token is the text of the whole, never taken back, and ends where a stop text begins."""

import functools

import hypothesis
import pytest
import transformers
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moe_jax.serving.handle import MAX_WINDOW, REPLACEMENT, StopSearch, TextStream
from moe_jax.serving.http.service import fewest_tokens
from tests.helpers import tiny

WORDS = "the same words über 你好世界 🙂🙃 naïve 日本語のテキスト"


@functools.cache
def byte_level():
    """Byte-level BPE with tokens that hold parts of characters, as Qwen and DeepSeek have it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([WORDS] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


@functools.cache
def byte_fallback():
    """Pieces with a mark for the space before a word, and bytes for other characters, as sentencepiece has them."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁word", "s", "你", "é", "."]
    raw = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<s>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


BYTES_OF_EMOJI = [1 + byte for byte in "🙂".encode()]

TOKENIZERS = {"bytes": tiny.tokenizer, "byte_level": byte_level, "byte_fallback": byte_fallback}

made = functools.cache(lambda name: TOKENIZERS[name]())


def decoded(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def added(tokenizer, prompt, new) -> str:
    return decoded(tokenizer, prompt + new)[len(decoded(tokenizer, prompt).removesuffix(REPLACEMENT)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None)
def test_pieces_are_the_text_of_the_whole(name, data):
    tokenizer = made(name)
    # Some ids are outside the vocabulary.
    some = st.integers(0, len(tokenizer) + 3)
    if name == "byte_fallback":
        some |= st.sampled_from([*range(257, len(tokenizer)), *BYTES_OF_EMOJI])
    prompt = data.draw(st.lists(some, max_size=8))
    new = data.draw(st.lists(some, max_size=60))
    stream, text = TextStream(tokenizer, prompt), ""
    for number, token in enumerate(new, 1):
        text += stream.add(token)
        if name != "byte_fallback":
            now = added(tokenizer, prompt, new[:number])
            assert text == now.removesuffix(REPLACEMENT), "a complete character is held back, or an incomplete one was given"
    assert text + stream.flush() == added(tokenizer, prompt, new)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_come_back_whole(name):
    tokenizer = made(name)
    new = {"byte_fallback": [258, 259, 260, *BYTES_OF_EMOJI, 261, 259]}.get(name) or tokenizer(WORDS * 9)["input_ids"]
    stream = TextStream(tokenizer, new[:1])
    pieces = [stream.add(token) for token in new[1:]]
    assert "".join(pieces) == decoded(tokenizer, new)[len(decoded(tokenizer, new[:1])) :]
    assert len([piece for piece in pieces if piece]) > 3 and stream.flush() == ""


def test_a_run_of_bytes_waits_for_its_end():
    stream = TextStream(byte_fallback(), [258])
    assert [stream.add(token) for token in [259, *BYTES_OF_EMOJI, 0]] == [" word", "", "", "", "", ""]
    assert stream.add(260) == "🙂s"
    assert [stream.add(token) for token in BYTES_OF_EMOJI] == [""] * 4 and stream.flush() == "🙂"


def test_the_cost_of_a_token_does_not_grow(monkeypatch):
    sizes = []
    tokenizer = tiny.tokenizer()
    decode = type(tokenizer).decode
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **_: sizes.append(len(ids)) or decode(self, ids, **_))
    stream = TextStream(tokenizer, [7] * 1000)
    # 0xFF is never a part of a character.
    wrong = tokenizer.convert_tokens_to_ids("ÿ")
    assert [stream.add(token) for token in [wrong] * 200][1:] == [REPLACEMENT] * 199
    assert max(sizes) <= MAX_WINDOW + 1


TEXT = st.text("abc", max_size=12)


@hypothesis.given(TEXT, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 12), max_size=4))
def test_stop_texts_are_found_across_pieces(text, stops, borders):
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    search, given = StopSearch(stops), ""
    borders = sorted(borders)
    for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
        given += search.add(text[start:end])
        before = text[: max(end, start)]
        if not search.found:
            assert not any(stop in before for stop in stops)
            held = before[len(given) :]
            assert not held or any(stop.startswith(held) for stop in stops), "text is held back that begins no stop text"
    assert search.found == bool(ends)
    assert given + search.flush() == (text[: min(ends)[1]] if ends else text)


def test_a_stop_text_across_tokens_ends_the_stream():
    tokenizer = tiny.tokenizer()
    stream = TextStream(tokenizer, tokenizer("say ")["input_ids"], stop=["END", "\n\n"])
    pieces = [stream.add(token) for token in tokenizer("an EN or ENDS more")["input_ids"]]
    assert "".join(pieces) == "an EN or " and stream.stopped
    assert pieces[3:5] == ["", ""] and pieces[5] == "EN "
    assert stream.flush() == ""


def test_held_text_comes_at_the_end():
    tokenizer = tiny.tokenizer()
    stream = TextStream(tokenizer, stop=["END"])
    assert "".join(stream.add(token) for token in tokenizer("the EN")["input_ids"]) == "the "
    assert stream.flush() == "EN" and not stream.stopped


def with_steps(normalizer=None, pre_tokenizer=None, specials=("<|end|>",), **model):
    """BPE of bytes, or of characters with single bytes for those outside its vocabulary, with steps before its merges."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if model else sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += ["\N{LOWER ONE EIGHTH BLOCK}", "e", "t", "h", "th", "the"] if model else ["th", "the"]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("t", "h"), ("th", "e")], **model))
    raw.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_special_tokens(list(specials))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
WORDS_AND_BYTES = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), BYTES])
MARKED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BOUNDED = {
    "bytes": with_steps(pre_tokenizer=BYTES),
    "composed": with_steps(normalizers.NFC(), WORDS_AND_BYTES),
    "fallback": with_steps(MARKED, byte_fallback=True),
}
UNBOUNDED = {
    "words": byte_fallback(),
    "unknown": with_steps(pre_tokenizer=BYTES, unk_token="<|end|>", byte_fallback=False, fuse_unk=True),
    "stripped": with_steps(normalizers.Strip(), BYTES),
    "removed": with_steps(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])),
    "shorter": with_steps(normalizers.Replace("the", ""), BYTES),
    "greedy": with_steps(pre_tokenizer=BYTES, specials=[AddedToken("<|end|>", rstrip=True)]),
}


@pytest.mark.parametrize("kind", BOUNDED)
@hypothesis.given(
    text=st.text(st.sampled_from("the  K\u212b\u1fbe\u0308\u0301ΐ你🙂")) | st.sampled_from(["the" * 50, "<|end|>" * 9])
)
def test_no_text_has_fewer_tokens_than_its_length_tells(kind, text):
    tokenizer = BOUNDED[kind]
    assert fewest_tokens(tokenizer, text) <= len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert fewest_tokens(tokenizer, text * 100) > 0 or not text


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_text_tells_nothing(kind):
    assert fewest_tokens(UNBOUNDED[kind], "the " * 1000) == 0
