"""The text does not depend on how tokens are cut, no text is lost, and no part of a stop string is delivered."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from model_worker.text import Detokenizer, StopMatcher, TextStream

no_deadline = settings(deadline=None)  # a slow machine must not fail the test

# byte-level: a token is some bytes, decoded together as UTF-8


class Bytes:
    """A byte-level tokenizer with arbitrary pieces. Id -1 is a special token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.longest_call = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest_call = max(self.longest_call, len(ids))
        return b"".join(self.pieces[i] for i in ids if i >= 0).decode("utf-8", "replace")


@st.composite
def cut_bytes(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Return bytes that are cut into pieces at arbitrary places."""
    whole = draw(data)
    places = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=40)) | {0, len(whole)})
    return [whole[a:b] for a, b in itertools.pairwise(places)]


text_bytes = st.text(st.sampled_from("aé さ🦊\u200d️ \n\ufffd"), max_size=40).map(str.encode)


@no_deadline
@given(cut_bytes(text_bytes), cut_bytes(text_bytes))
def test_any_split_of_text_gives_the_text(prompt: list[bytes], pieces: list[bytes]) -> None:
    tokenizer = Bytes([*prompt, *pieces])
    detokenizer = Detokenizer(tokenizer.decode, range(len(prompt)))
    parts = [detokenizer.push(len(prompt) + i) for i in range(len(pieces))]
    assert "".join(parts) + detokenizer.flush() == b"".join(pieces).decode()
    if "\ufffd" not in b"".join(pieces).decode():
        assert not any("\ufffd" in part for part in parts)


@no_deadline
@given(cut_bytes(st.binary(max_size=60)))
def test_any_split_of_garbage_gives_what_decoding_at_once_gives(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(Bytes(pieces).decode)
    parts = [detokenizer.push(i) for i in range(len(pieces))]
    assert "".join(parts) + detokenizer.flush() == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize("piece", [b"word ", b"\x80", b"\xe3", b"", "🦊".encode()])
def test_the_window_stays_small(piece: bytes) -> None:
    tokenizer = Bytes([piece] * 2000)
    detokenizer = Detokenizer(tokenizer.decode, range(500))
    parts = [detokenizer.push(i) for i in range(500, 2000)]
    assert "".join(parts) + detokenizer.flush() == (piece * 1500).decode("utf-8", "replace")
    assert tokenizer.longest_call < 32


def test_special_tokens_have_no_text_and_cost_nothing() -> None:
    tokenizer = Bytes([b"a", b" b"])
    detokenizer = Detokenizer(tokenizer.decode)
    parts = [detokenizer.push(i) for i in [-1, 0, *[-1] * 500, 1, -1]]
    assert "".join(parts) + detokenizer.flush() == "a b"
    assert tokenizer.longest_call < 10


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    fox = "🦊".encode()
    tokenizer = Bytes([b"see ", fox[:1], fox[1:3], fox[3:]])
    detokenizer = Detokenizer(tokenizer.decode, [0, 1, 2])
    assert detokenizer.push(3) == "🦊"


# sentencepiece: the first space is dropped in decoding, unknown characters fall back to bytes

PIECES = ["▁", "▁Hello", "▁world", "Hello", "s", "▁é", "!", "."]
VOCABULARY = {"<s>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, **{p: 257 + i for i, p in enumerate(PIECES)}}


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def ids_of(*pieces: str | bytes) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += [b + 1 for b in piece] if isinstance(piece, bytes) else [VOCABULARY[piece]]
    return ids


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.decode, prompt)
    return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()


def test_words_keep_their_space_after_a_prompt(sentencepiece: Tokenizer) -> None:
    ids = ids_of("▁world", "s", "▁", "▁Hello", "▁é", "!")
    assert stream(sentencepiece, ids, ids_of("▁Hello")) == " worlds  Hello é!"
    assert stream(sentencepiece, ids, []) == "worlds  Hello é!", "as decoding does where nothing stands before"


def test_a_space_before_the_first_word_is_dropped_once(sentencepiece: Tokenizer) -> None:
    assert stream(sentencepiece, ids_of("▁", "▁Hello"), ids_of("<s>")) == " Hello"
    assert stream(sentencepiece, ids_of(*["<s>"] * 50, "▁", "▁", "▁Hello"), []) == "  Hello"


@no_deadline
@given(st.lists(st.sampled_from([*PIECES, "🦊".encode(), "é".encode(), "さ".encode(), "<s>"]), max_size=20))
def test_sentencepiece_streams_what_it_decodes(sentencepiece: Tokenizer, pieces: list[str | bytes]) -> None:
    prompt, ids = ids_of("▁Hello"), ids_of(*pieces)
    whole = sentencepiece.decode(prompt + ids)
    assert stream(sentencepiece, ids, prompt) == whole.removeprefix("Hello")


def test_byte_fallback_garbage_ends(sentencepiece: Tokenizer) -> None:
    text = stream(sentencepiece, ids_of("é".encode(), b"\x80" * 50, "▁Hello"), ids_of("▁Hello"))
    assert text.startswith("é")
    assert text.endswith(" Hello")


# stop strings

letters = st.text(st.sampled_from("ab\n"), max_size=24)
stops = st.lists(st.text(st.sampled_from("ab\n"), max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first stop string that ends, by a slow search that follows the definition."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if s and text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@no_deadline
@given(letters, stops, st.lists(st.integers(0, 24), max_size=10))
def test_stop_strings_do_not_depend_on_the_split(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    places = sorted({0, len(text), *(p for p in places if p < len(text))})
    out, found = "", False
    expected = cut_at_stop(text, stops)
    for a, b in itertools.pairwise(places):
        piece, found = matcher.push(text[a:b])
        out += piece
        assert expected[0].startswith(out), "nothing of a stop string leaks"
        if found:
            break
    if not found:
        out += matcher.flush()
    assert (out, found) == expected


@no_deadline
@given(st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=12), min_size=1, max_size=3), letters)
def test_text_is_held_exactly_as_far_as_a_stop_string_may_have_begun(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for end, character in enumerate(text, 1):
        piece, found = matcher.push(character)
        out += piece
        if found:
            break
        held = text[len(out) : end]
        assert any(stop.startswith(held) for stop in stops)
        longest = max(k for k in range(end + 1) for stop in stops if stop.startswith(text[end - k : end]))
        assert len(held) == longest


def test_stop_strings_made_to_be_slow_are_not() -> None:
    """The test counts compared characters instead of seconds."""
    compared = 0

    class Counted(str):
        def __getitem__(self, key: object) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(key)  # type: ignore[index]

    matcher = StopMatcher([Counted("a" * 250 + end) for end in "bcdefghijk"])
    compared = 0
    for _ in range(300):
        matcher.push("aaa!")
        matcher.push("a")
    assert compared < 10 * 300 * 5 * 3
    # 64 KiB of stop strings: a character costs a few searches among sorted ones.
    many = [Counted(f"{i:04x}{'é' * 2}") for i in range(1 << 13)]
    matcher = StopMatcher(many)
    compared = 0
    for i in range(300):
        assert not matcher.push(f"{i:04x}012z")[1]
    assert compared < 300 * 8 * 5 * 2 * 14
    assert matcher.push("1fffé") == ("", False)
    assert matcher.push("é!")[1]
    assert matcher.found == many[-1]


def test_only_what_may_be_a_stop_string_is_held() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("e the \n") == ("\n\nUse the ", False)
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""
    assert matcher.push("\nUser:\n") == ("\nUser:", False), "what was let go begins nothing"


@no_deadline
@given(cut_bytes(text_bytes), st.lists(st.text(st.sampled_from("aé さ🦊"), max_size=3), max_size=2))
def test_the_stream_is_detokenizer_and_matcher(pieces: list[bytes], stops: list[str]) -> None:
    whole = b"".join(pieces).decode()
    out = TextStream(Bytes(pieces).decode, (), stops)
    text = ""
    for i in range(len(pieces)):
        piece, found = out.push(i)
        text += piece
        if found:
            break
    else:
        text += out.finish()
    assert text == cut_at_stop(whole, stops)[0]


def test_finish_delivers_what_is_held() -> None:
    out = TextStream(Bytes([b"so\n", "🦊".encode()[:2]]).decode, (), ["\nUser", "\ufffd\ufffd"])
    assert out.push(0) == ("so", False)
    assert out.push(1) == ("", False)
    assert out.finish() == "\n\ufffd"


def test_stop_strings_from_some_token_on() -> None:
    out = TextStream(Bytes([b"stop ", b"st", b"op!"]).decode)
    assert out.push(0) == ("stop ", False)
    out.stop_at(["stop"])
    assert out.push(1) == ("", False)
    assert out.push(2) == ("", True)
