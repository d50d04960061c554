"""The table of pieces gives the text that the tokenizer decodes and that the window of ids delivers, for any ids."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from model_worker.engine import Layout
from model_worker.engines import tokenizer as model_tokenizer
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import NoPieces, read_pieces
from model_worker.text import Detokenizer, PieceDetokenizer, Pieces
from tools.demo_models import directory

no_deadline = settings(deadline=None)  # a slow machine must not fail the test

SPECIAL = "<|special|>"


def byte_level() -> Tokenizer:
    """Return a tokenizer with every byte, and with tokens that begin and end inside characters."""
    characters = _byte_characters()
    texts = [" the", "é", " é", "🦊", "さ", "\ufffd", "\n\n", "a"]
    wholes = [text.encode() for text in texts]
    parts = [
        b"\xf0\x9f", b"\xa6\x8a", b" \xe3\x81", b"\x95a", b"\x80\x80", b"\xff\xfe", b"\xed\xa0", b"\xed\xb7", b"\xc3",
        b"\x81\x95\xe3", b"\xf4\x90", b"\xe0\x80",
    ]  # fmt: skip
    pieces = dict.fromkeys([*(bytes([b]) for b in range(256)), *wholes, *parts])
    tokenizer = Tokenizer(models.BPE({"".join(characters[b] for b in p): i for i, p in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    # these contain characters outside the byte-level alphabet, so they stand for their own UTF-8
    tokenizer.add_tokens([AddedToken("é x", normalized=False), AddedToken("日本", normalized=False), "Ġadded"])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the library's own alphabet in the order of bytes, found by encoding each byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    encode = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    table: dict[int, str] = {}
    for code in [*range(0x80), *range(0x80, 0x800, 0x20), *range(0x80, 0xC0), *range(0x800, 0x10000, 0x800)]:
        if not 0xD800 <= code < 0xE000:
            table.update(zip(chr(code).encode(), encode(chr(code))[0][0], strict=True))
    for code in range(0x10000, 0x110000, 0x1000):
        table.update(zip(chr(code).encode(), encode(chr(code))[0][0], strict=True))
    # the remaining bytes occur in no valid UTF-8
    return [table.get(byte, chr(byte)) for byte in range(256)]


def sentencepiece(strips: bool) -> Tokenizer:
    texts = ["▁", "▁▁", "▁Hello", "▁world", "Hello", "s", "▁é", "!", ".", "", "\ufffd", "<0xZZ>", "さ", "a▁b"]
    vocabulary = {"<s>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, **{p: 257 + i for i, p in enumerate(texts)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if strips else steps[:3])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken("▁added x", normalized=False)])
    return tokenizer


KINDS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(strips=True),
    "sentencepiece, spaces kept": sentencepiece(strips=False),
    "letters": Tokenizer.from_file(str(directory("letters") / "tokenizer.json")),
    "stories": Tokenizer.from_file(str(directory("stories") / "tokenizer.json")),
}
TABLES = {kind: read_pieces(tokenizer, tokenizer.get_vocab_size()) for kind, tokenizer in KINDS.items()}


def decode(kind: str, ids: Sequence[int]) -> str:
    text: str = KINDS[kind].decode(ids, skip_special_tokens=True)
    return text


def by_table(kind: str, ids: Sequence[int], context: Sequence[int] = ()) -> str:
    stream = PieceDetokenizer(TABLES[kind], context)
    return "".join(map(stream.push, ids)) + stream.flush()


def by_window(kind: str, ids: Sequence[int], context: Sequence[int] = ()) -> str:
    stream = Detokenizer(lambda some: decode(kind, some), context)
    return "".join(map(stream.push, ids)) + stream.flush()


@st.composite
def some_ids(draw: st.DrawFn, kind: str, max_size: int = 24) -> list[int]:
    """Return random ids, some beyond the vocabulary. Fallback bytes come as whole characters, or alone between
    texts."""
    table = TABLES[kind].table
    if not TABLES[kind].byte_runs:
        return draw(st.lists(st.integers(0, len(table) + 2), max_size=max_size))
    # no empty text: the window is wrong for it between bytes, and the table is not
    texts = st.sampled_from([i for i, piece in enumerate(table) if isinstance(piece, str) and piece])
    nothing = st.sampled_from([i for i, piece in enumerate(table) if piece is None] + [len(table) + 5])
    characters = st.text(st.sampled_from("aé さ🦊\n"), min_size=1, max_size=2).map(lambda text: text.encode())
    ids: list[int] = []
    for data, *others in draw(st.lists(st.tuples(characters | st.binary(max_size=1), nothing, texts), max_size=8)):
        ids += [*(byte + 1 for byte in data), *others]
    return ids


@no_deadline
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_text_is_what_the_tokenizer_decodes(kind: str, data: st.DataObject) -> None:
    ids = data.draw(some_ids(kind))
    assert by_table(kind, ids) == decode(kind, ids)


@no_deadline
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_behind_a_prompt_it_is_what_the_window_delivers(kind: str, data: st.DataObject) -> None:
    context, ids = data.draw(some_ids(kind)), data.draw(some_ids(kind))
    if TABLES[kind].byte_runs:  # the window is wrong for a space that begins a run of bytes
        as_byte, as_text = (KINDS[kind].token_to_id(token) for token in ("<0x20>", "▁"))
        context, ids = ([as_text if i == as_byte else i for i in some] for some in (context, ids))
    assert by_table(kind, ids, context) == by_window(kind, ids, context)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_never_later_than_the_window(kind: str) -> None:
    order = random.Random(7)
    ids = [order.randrange(len(TABLES[kind].table)) for _ in range(2000)]
    if TABLES[kind].byte_runs:
        ids = [i for i in ids if not isinstance(TABLES[kind].table[i], bytes)]
    table, window = PieceDetokenizer(TABLES[kind]), Detokenizer(lambda some: decode(kind, some))
    ahead = 0
    for token_id in ids:
        ahead += len(table.push(token_id)) - len(window.push(token_id))
        assert ahead >= 0


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["Hello", b"\xe3\x81", "s"], "Hello\ufffd\ufffds"),
        ([b"\xe3\x81"], "\ufffd\ufffd"),
        ([b"\x80", "é".encode(), "s"], "\ufffd\ufffd\ufffds"),
        (["é".encode(), b"\x80", "é".encode(), "s", "é".encode()], "é\ufffd\ufffd\ufffdsé"),
        ([b"\x80", "<s>", b"A", "", b"A"], "\ufffd\ufffdA"),
    ],
)
def test_a_broken_run_of_bytes_is_one_replacement_a_byte(pieces: list[str | bytes], text: str) -> None:
    """As in decoding, each byte from the first invalid one on becomes U+FFFD. Delivered text is not changed."""
    tokenizer = KINDS["sentencepiece"]
    ids: list[int] = []
    for piece in pieces:
        ids += [b + 1 for b in piece] if isinstance(piece, bytes) else [tokenizer.token_to_id(piece)]
    assert by_table("sentencepiece", ids) == text


def test_a_space_is_dropped_at_the_beginning_of_a_text_only() -> None:
    space, hello, start = (KINDS["sentencepiece"].token_to_id(t) for t in ("▁", "▁Hello", "<s>"))
    assert by_table("sentencepiece", [start, hello, hello]) == "Hello Hello"
    assert by_table("sentencepiece", [space, hello]) == " Hello"
    assert by_table("sentencepiece", [hello], [start]) == "Hello"
    assert by_table("sentencepiece", [hello], [start, hello]) == " Hello"
    assert by_table("sentencepiece, spaces kept", [hello], [start]) == " Hello"


@pytest.mark.parametrize("begun", [b"\xf0\x9f", b"\xf0\x9f\xa6"])
def test_a_character_begun_in_the_prompt(begun: bytes) -> None:
    rest = "🦊".encode()[len(begun) :]
    for kind, first in (("byte-level", 0), ("sentencepiece", 1)):
        context = [first + b for b in begun]
        assert by_table(kind, [first + b for b in rest], context) == "🦊"
        assert by_table(kind, [first + ord("!")], [257 + 9, *context, 257 + 9] if first else context) == "!"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
        ),
    ],
    ids=str,
)
def test_another_kind_of_decoder_has_no_pieces(decoder: object) -> None:
    tokenizer = sentencepiece(strips=True)
    if decoder is None:
        tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    else:
        tokenizer.decoder = decoder
    with pytest.raises(NoPieces, match="of another kind"):
        read_pieces(tokenizer, tokenizer.get_vocab_size())


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_table_that_reads_the_decoder_wrongly_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong entry anywhere in the vocabulary is enough to refuse the table."""
    from model_worker.engines import tokenizer as token_pieces

    name = "_byte_level" if kind == "byte-level" else "_sentencepiece"
    read = getattr(token_pieces, name)
    for wrong in (1, 120, len(TABLES[kind].table) - 2):

        def table(tokens: Sequence[str | None], wrong: int = wrong) -> list[str | bytes | None]:
            entries = list(read(tokens))
            entries[wrong] = "?!"
            return entries

        monkeypatch.setattr(token_pieces, name, table)
        with pytest.raises(NoPieces, match="not give what"):
            read_pieces(KINDS[kind], KINDS[kind].get_vocab_size())


def test_a_model_streams_by_its_table_or_says_why_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = directory("letters")
    for file in source.iterdir():
        shutil.copy(file, tmp_path)
    with_table = model_tokenizer.Tokenizer(ModelDir(str(tmp_path)))
    assert isinstance(with_table.pieces, Pieces)
    assert capfd.readouterr().out == ""
    content = json.loads((source / "tokenizer.json").read_text())
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [content["decoder"], {"type": "Strip", "content": "x", "start": 1, "stop": 0}],
    }
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    without = model_tokenizer.Tokenizer(ModelDir(str(tmp_path)))
    assert without.pieces is None
    assert "ByteLevel + Strip" in capfd.readouterr().out
    ids = with_table.encode("sort: d b a ->")
    for tokenizer in (with_table, without):
        stream = tokenizer.stream(ids[:2], [" a"])
        parts = [stream.push(token_id) for token_id in ids[2:]]
        assert "".join(text for text, _ in parts[:4]) == ": d b"
        assert any(found for _, found in parts)


@pytest.mark.parametrize("strips", [True, False])
def test_special_tokens_that_are_normalized_have_no_text(strips: bool, tmp_path: Path) -> None:
    """Old files of Llama call their special tokens normalized. tokenizers 0.23 decodes them as text, even if it is
    asked to skip special tokens."""
    library = Tokenizer.from_str(sentencepiece(strips).to_str())
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens([AddedToken("</s>", normalized=True)])
    end = library.token_to_id("</s>")
    shutil.copytree(directory("letters"), tmp_path / "model")
    library.save(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = model_tokenizer.Tokenizer(ModelDir(str(tmp_path / "model")))
    hello, world = library.token_to_id("▁Hello"), library.token_to_id("▁world")
    ids = [end, hello, end, world, end]
    wanted = "Hello world" if strips else " Hello world"
    assert tokenizer.decode(ids) == wanted
    assert tokenizer.pieces is not None
    for stream in (tokenizer.stream([]), tokenizer.stream([], layout=Layout(visible=frozenset({"<s>"})))):
        assert "".join(stream.push(i)[0] for i in ids) + stream.finish() == wanted
    window = Detokenizer(tokenizer.decode)
    assert "".join(map(window.push, ids)) + window.flush() == wanted
    assert tokenizer.token_bytes(end) == b"</s>"
