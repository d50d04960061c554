"""Engine embedding gives what transformers' own classes give, for each kind of model, alone and in any batch."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from model_worker.embedding import EmbedJob, NewVectors, texts_in_piece
from model_worker.engine import EngineEvent, Failed, Finished, LoadError, Prefilling
from model_worker.engines.embedding.directory import POOLINGS
from protocol.errors import ErrorCode, RequestError
from tests.engines.tiny_embedding import KINDS, WORDS, describe, engine, run, vectors, write

TEXTS = ["the quick brown fox", "a", "the lazy dog , is red .", " ".join(WORDS), "what ? unknown !"]


def plain(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@torch.inference_mode()
def hidden(directory: Path, text: str) -> torch.Tensor:
    """Return the last layer of one text, without padding."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return model(input_ids=torch.tensor([plain(directory).encode(text).ids])).last_hidden_state[0]


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda h: h[0],
    "mean": lambda h: h.mean(0),
    "max": lambda h: h.amax(0),
    "mean_sqrt_len": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / sum(range(1, len(h) + 1)),
    "lasttoken": lambda h: h[-1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_each_kind_alone_and_in_a_batch(tmp_path: Path, kind: str) -> None:
    directory = describe(write(tmp_path, kind), "lasttoken" if kind == "qwen3" else "mean")
    pool = POOLED["lasttoken" if kind == "qwen3" else "mean"]
    expected = numpy.stack([torch.nn.functional.normalize(pool(hidden(directory, t)), dim=0) for t in TEXTS])
    loaded = engine(directory)
    assert abs(vectors(loaded, TEXTS) - expected).max() < 1e-5
    assert abs(numpy.concatenate([vectors(loaded, [text]) for text in TEXTS]) - expected).max() < 1e-5


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_in_both_spellings(tmp_path: Path, pooling: str, old: bool) -> None:
    write(tmp_path, "bert")
    spelled = {"cls": "cls_token", "lasttoken": "lasttoken"}.get(pooling, f"{pooling}_tokens") if old else pooling
    describe(
        tmp_path, spelled if old or pooling != "mean_sqrt_len" else "mean_sqrt_len_tokens", normalize=False, old=old
    )
    expected = numpy.stack([POOLED[pooling](hidden(tmp_path, text)) for text in TEXTS])
    assert abs(vectors(engine(tmp_path), TEXTS) - expected).max() < 1e-5


def test_several_poolings_are_joined(tmp_path: Path) -> None:
    describe(write(tmp_path, "bert"), ["cls", "max"], normalize=False)
    both = [torch.cat([POOLED[name](hidden(tmp_path, text)) for name in ("cls", "max")]) for text in TEXTS]
    loaded = engine(tmp_path)
    assert abs(vectors(loaded, TEXTS) - numpy.stack(both)).max() < 1e-5


def test_dense_layers(tmp_path: Path) -> None:
    describe(write(tmp_path, "bert"), normalize=False)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    config = {"in_features": 32, "out_features": 8, "bias": True}
    config["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    expected = [torch.tanh(weight @ POOLED["mean"](hidden(tmp_path, text)) + bias) for text in TEXTS]
    assert abs(vectors(engine(tmp_path), TEXTS) - numpy.stack(expected)).max() < 1e-5


def test_prompts_and_what_is_left_out_of_the_mean(tmp_path: Path) -> None:
    describe(write(tmp_path, "bert"), normalize=False, include_prompt=False)
    settings = {"prompts": {"query": "what is ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    loaded = engine(tmp_path)
    # Without [CLS] and the words of the prompt, as sentence-transformers counts the prompt.
    expected = hidden(tmp_path, "what is the red fox")[3:].mean(0).numpy()
    assert abs(vectors(loaded, ["the red fox"])[0] - expected).max() < 1e-5
    assert abs(vectors(loaded, ["the red fox"], prompt="query")[0] - expected).max() < 1e-5
    whole = hidden(tmp_path, "the red fox").mean(0).numpy()
    assert abs(vectors(loaded, ["the red fox"], prompt="")[0] - whole).max() < 1e-5
    with pytest.raises(RequestError, match="prompt_name is 'nosuch': this model's prompts are query"):
        vectors(loaded, ["the"], prompt="nosuch")


def test_dimensions_are_cut_and_normalised_again(tmp_path: Path) -> None:
    loaded = engine(describe(write(tmp_path, "bert")))
    whole, short = vectors(loaded, TEXTS), vectors(loaded, TEXTS, dimensions=8)
    assert abs(short - whole[:, :8] / numpy.linalg.norm(whole[:, :8], axis=1, keepdims=True)).max() < 1e-6
    with pytest.raises(RequestError, match="dimensions is 33: this model's vectors have 32 numbers"):
        vectors(loaded, TEXTS, dimensions=33)


def test_texts_that_are_too_long(tmp_path: Path) -> None:
    describe(write(tmp_path, "bert"))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 10, "do_lower_case": True}))
    loaded = engine(tmp_path)
    assert loaded.capabilities.context == 10
    long = "the fox " * 20
    with pytest.raises(RequestError, match=r"texts\[1\] has 42 tokens: this model takes at most 10: .* truncate: true"):
        vectors(loaded, ["a", long])
    cut = vectors(loaded, ["a", long, "THE Fox"], truncate=True)
    # Eight words between the special tokens; and upper case is lower case here.
    assert abs(cut[1] - vectors(loaded, ["the fox " * 4])[0]).max() < 1e-6
    assert abs(cut[2] - vectors(loaded, ["the fox"])[0]).max() < 1e-6
    with pytest.raises(RequestError, match=r"texts\[0\] has 1000000 characters") as e:
        vectors(loaded, ["x" * 1_000_000])
    assert e.value.code is ErrorCode.CONTEXT_OVERFLOW
    assert engine(tmp_path, max_seq_len=64).capabilities.context == 64


def test_lists_of_tokens(tmp_path: Path) -> None:
    loaded = engine(describe(write(tmp_path, "bert")))
    ids = plain(tmp_path).encode("the red fox").ids
    assert abs(vectors(loaded, [ids]) - vectors(loaded, ["the red fox"])).max() < 1e-6
    with pytest.raises(RequestError, match=r"token_ids\[1\] has the id 64, and this model's vocabulary has 64"):
        vectors(loaded, [ids, [5, 64]])
    with pytest.raises(RequestError, match=r"token_ids\[0\] has no tokens"):
        vectors(loaded, [[]])


def pair_ids(directory: Path, query: str, document: str) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = plain(directory).encode(query, document)
    return torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_cross_encoders(tmp_path: Path, kind: str, activation: str | None) -> None:
    more: dict[str, Any] = {"num_labels": 1}
    if activation:
        more["sbert_ce_default_activation_function" if kind == "bert" else "sentence_transformers"] = (
            activation if kind == "bert" else {"activation_fn": activation}
        )
    write(tmp_path, kind, "ForSequenceClassification", **more)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            ids, kinds = pair_ids(tmp_path, "who is red", text)
            logit = model(input_ids=ids, **({"token_type_ids": kinds} if kind == "bert" else {})).logits[0, 0]
            expected.append(logit if activation else torch.sigmoid(logit))
    loaded = engine(tmp_path)
    assert abs(vectors(loaded, TEXTS, query="who is red")[:, 0] - numpy.array(expected)).max() < 1e-5
    cut = vectors(loaded, ["the fox " * 60], query="who is red", truncate=True)[0, 0]
    ids, kinds = pair_ids(tmp_path, "who is red", "the fox " * 60)
    most, behind = loaded.capabilities.context, 1  # [SEP] stays
    ids, kinds = (torch.cat([each[:, : most - behind], each[:, -behind:]], dim=1) for each in (ids, kinds))
    with torch.inference_mode():
        logit = model(input_ids=ids, **({"token_type_ids": kinds} if kind == "bert" else {})).logits[0, 0]
    assert abs(cut - (logit if activation else torch.sigmoid(logit)).item()) < 1e-5
    with pytest.raises(RequestError, match="shorten the query"):
        vectors(loaded, ["the fox"], query="the fox " * 60, truncate=True)


def test_scores_of_a_language_model_that_says_yes_or_no(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", "ForCausalLM", max_position_embeddings=1024)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    loaded = engine(tmp_path, task="rerank")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = plain(tmp_path)
    head = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    tail = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    expected = []
    for text in TEXTS:
        body = f"<Instruct>: the usual\n<Query>: who is red\n<Document>: {text}"
        ids = [
            *tokenizer.encode(head, add_special_tokens=False).ids,
            *tokenizer.encode(body).ids,
            *tokenizer.encode(tail, add_special_tokens=False).ids,
        ]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        expected.append(torch.softmax(logits[[no, yes]], dim=0)[1].item())
    scores = vectors(loaded, TEXTS, query="who is red", prompt="the usual")[:, 0]
    assert abs(scores - numpy.array(expected)).max() < 1e-5
    # A document cannot end the question.
    ended, written = (vectors(loaded, [f"fox {end} dog"], query="a")[0, 0] for end in ("<|im_end|>", "<| im_end |>"))
    assert ended == pytest.approx(written, abs=1e-6)


def of_job(events: list[EngineEvent | NewVectors], job: int) -> list[EngineEvent | NewVectors]:
    return [event for event in events if event.job == job]


def test_many_requests_at_once_give_each_its_own_vectors(tmp_path: Path) -> None:
    loaded = engine(describe(write(tmp_path, "bert")), batch_tokens=64)
    drawn = random.Random(3)
    asked = {
        job: [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 40))) for _ in range(drawn.randint(1, 30))]
        for job in range(1, 20)
    }
    for job, texts in asked.items():
        loaded.submit(EmbedJob(job, texts))
    cancelled = {3, 7}
    events = loaded.step() + loaded.step()
    for job in cancelled:
        loaded.cancel(job)
    events += run(loaded)
    for job in asked.keys() - cancelled:
        first, *middle, last = of_job(events, job)
        assert isinstance(first, Prefilling)
        assert isinstance(last, Finished)
        assert last.prompt_tokens == first.total
        found = numpy.concatenate([numpy.frombuffer(e.data, "<f4").reshape(-1, 32) for e in middle])  # type: ignore[union-attr]
        assert abs(found - vectors(loaded, asked[job])).max() < 1e-5
    assert not any(isinstance(event, Finished) for job in cancelled for event in of_job(events, job))


def test_a_request_that_another_worker_began_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.embedding.PIECE_BYTES", 4 * 32 * 3)  # three texts for each event
    loaded = engine(describe(write(tmp_path, "bert")))
    assert texts_in_piece(32) == 3
    texts = [f"w{number} fox" for number in range(10)]
    loaded.submit(EmbedJob(1, texts))
    whole = [event for event in run(loaded) if isinstance(event, NewVectors)]
    assert [event.first for event in whole] == [0, 3, 6, 9]
    for sent in range(5):
        loaded.submit(EmbedJob(1, texts, sent=sent))
        events = run(loaded)
        assert [event.first for event in events if isinstance(event, NewVectors)] == [0, 3, 6, 9][sent:]
        assert isinstance(events[-1], Finished)
        assert events[-1].prompt_tokens == 40


def test_one_wrong_request_fails_alone(tmp_path: Path) -> None:
    loaded = engine(describe(write(tmp_path, "bert")))
    loaded.submit(EmbedJob(1, ["the fox"]))
    loaded.submit(EmbedJob(2, ["the fox " * 200]))
    loaded.submit(EmbedJob(3, ["half \ud800"]))
    events = run(loaded)
    assert [type(event) for event in of_job(events, 1)] == [Prefilling, NewVectors, Finished]
    assert all([type(event) for event in of_job(events, job)] == [Failed] for job in (2, 3))


def test_a_query_that_fills_the_model_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    """Else one request stops the others for as long as its query takes."""
    loaded = engine(write(tmp_path, "bert", "ForSequenceClassification", num_labels=1))
    for fields in ({"query": "fox " * 5000}, {"query": "fox", "prompt": "x" * 20_000}):
        with pytest.raises(RequestError, match="characters: this model takes no more than 64 tokens") as e:
            loaded.submit(EmbedJob(1, ["a"], truncate=True, **fields))  # type: ignore[arg-type]
        assert e.value.field == ("query" if len(fields) == 1 else "instruction")


def test_a_step_reads_a_part_of_the_texts_of_all_requests(tmp_path: Path) -> None:
    loaded = engine(describe(write(tmp_path, "bert")))
    for number in range(40):
        loaded.submit(EmbedJob(number, ["x" * 3000] * 100, truncate=True))
    loaded.submit(EmbedJob(40, [""] * 65_536))
    loaded.step()
    read = [len(request.rows) for request in loaded._requests.values()]
    assert 0 < sum(read) < 3000
    for _ in range(40):
        loaded.step()
    assert all(len(request.rows) for request in loaded._requests.values()), "each has its turns"


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    describe(write(tmp_path, "bert"), include_prompt=False)
    settings = {"prompts": {"long": "the fox " * 40, "short": "the "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    loaded = engine(tmp_path)
    with pytest.raises(RequestError, match="shorten the prompt") as e:
        vectors(loaded, ["a"], prompt="long", truncate=True)
    assert e.value.field == "prompt_name"
    assert len(vectors(loaded, ["fox " * 100], prompt="short", truncate=True)) == 1


def test_room_for_a_text_and_keys_without_a_use(tmp_path: Path) -> None:
    describe(write(tmp_path / "bert", "bert"))
    with pytest.raises(LoadError, match="3 are needed for a text of one") as e:
        engine(tmp_path / "bert", max_seq_len=2)
    assert e.value.key == "max_seq_len"
    reranker = write(tmp_path / "reranker", "bert", "ForSequenceClassification", num_labels=1)
    with pytest.raises(LoadError, match="pooling is mean, and scores need none"):
        engine(reranker, pooling="mean")


def test_another_use_of_the_model_is_another_maker(tmp_path: Path) -> None:
    def maker() -> bytes:
        loaded = engine(tmp_path)
        loaded.submit(EmbedJob(1, ["a"]))
        (made,) = (event.maker for event in run(loaded) if isinstance(event, NewVectors))
        return made

    describe(write(tmp_path, "bert"))
    before = maker()
    assert maker() == before != b""
    describe(tmp_path, "max")
    assert maker() != before
