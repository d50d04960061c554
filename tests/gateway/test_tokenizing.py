"""The tokenizer, the chat template and the models under the paths of vLLM, llama-server and TabbyAPI."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tail }}"
    "{% if add_generation_prompt %}>{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


class Asking:
    """Asks a gateway by plain requests."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return (status, JSON) of a GET, or of a POST if there is a body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Asking, Serving]]:
    port = free_port()
    chat = engine(context=500)
    chat["options"]["template"] = TEMPLATE
    models = {
        "plain": engine(context=1000),
        "chat": chat,
        "slow": engine("SlowLoad", load_s=0.5, lazy=True),
        "late": engine("SlowLoad", load_s=0.5, lazy=True),
    }
    with Serving(models, gateway={"listen": port, "auth": "none"}, wait=False) as serving:
        for name in ("plain", "chat"):
            serving.wait_state(name, "ready")
        yield Asking(port), serving


def test_tokens_have_the_keys_of_vllm_and_of_llama_server(served: tuple[Asking, Serving]) -> None:
    ask, _ = served
    whole = {"tokens": [97, 98], "count": 2, "max_model_len": 1000}
    assert ask("/tokenize", {"model": "plain", "prompt": "ab"}) == (200, whole)
    sent = {"content": "ab", "add_special": False, "parse_special": True, "with_pieces": True}
    pieces = [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    assert ask("/v1/tokenize", {"model": "plain"} | sent) == (200, whole | {"tokens": pieces})
    strings = {"add_special_tokens": True, "return_token_strs": True, "mm_processor_kwargs": None}
    assert ask("/tokenize", {"model": "plain", "prompt": "ab"} | strings) == (200, whole | {"token_strs": ["a", "b"]})
    for sent, named in (({"prompt": 3}, "prompt"), ({"prompt": "x", "add_special": 1}, "add_special"), ({}, "prompt")):
        status, refused = ask("/tokenize", {"model": "plain"} | sent)
        assert (status, refused["error"]["param"]) == (400, named)


def test_a_conversation_is_shown_as_the_model_reads_it(served: tuple[Asking, Serving]) -> None:
    ask, _ = served
    assert ask("/apply-template", {"model": "chat", "messages": CHAT}) == (200, {"prompt": "<s><user>hi>"})
    sent = {"chat_template_kwargs": {"tail": "!"}, "add_generation_prompt": False}
    assert ask("/apply-template", {"model": "chat", "messages": CHAT} | sent) == (200, {"prompt": "<s><user>hi!"})
    assert ask("/apply-template", {"model": "chat"})[1]["error"]["param"] == "messages"
    assert ask("/tokenize", {"model": "chat", "messages": CHAT})[1]["count"] == len("<s><user>hi>")


def test_tabbyapi_counts_and_lists(served: tuple[Asking, Serving]) -> None:
    ask, _ = served
    assert ask("/v1/token/encode", {"model": "plain", "text": "ab", "add_bos_token": False}) == (
        200,
        {"tokens": [97, 98], "length": 2},
    )
    assert ask("/v1/token/encode", {"model": "chat", "text": CHAT})[1]["length"] == len("<s><user>hi")
    assert ask("/v1/token/decode", {"model": "plain", "tokens": [97, 98]})[1]["text"] == "ab"
    listed = ask("/v1/models")[1]
    assert ask("/v1/model/list")[1] == listed
    assert ask("/v1/template/list") == (200, {"object": "list", "data": ["chat", "plain"]})
    assert ask("/v1/loras") == (200, {"object": "list", "data": []})


def test_a_model_is_described_without_being_loaded(served: tuple[Asking, Serving]) -> None:
    ask, serving = served
    status, card = ask("/v1/model")
    assert (status, card["id"], card["parameters"]) == (200, "chat", {"max_seq_len": 500, "prompt_template": "chat"})
    assert ask("/v1/model?model=late")[1]["state"] == "not-loaded"
    _, shown = ask("/props?model=chat")
    assert (shown["chat_template"], shown["bos_token"], shown["eos_token"]) == (TEMPLATE, "<s>", "</s>")
    assert shown["default_generation_settings"] == {"n_ctx": 500}
    assert ask("/tokenizer_info?model=chat")[1]["chat_template"] == TEMPLATE
    assert ask("/tokenizer_info?model=plain")[1].keys() == {"chat_template", "bos_token", "eos_token"}
    status, refused = ask("/props?model=late")
    assert (status, refused["error"]["code"]) == (503, "model_not_running")
    assert serving.status("late")["state"] == "unloaded"
    assert ask("/props?model=nothing")[0] == 404
    assert "version" in ask("/version")[1]


def test_a_count_waits_for_a_lazy_model(served: tuple[Asking, Serving]) -> None:
    ask, serving = served
    assert serving.status("slow")["state"] == "unloaded"
    assert ask("/tokenize", {"model": "slow", "prompt": "ab"})[1]["count"] == 2
    assert serving.status("slow")["state"] == "ready"
    assert ask("/v1/messages/count_tokens", {"model": "late", "messages": CHAT}) == (200, {"input_tokens": 8})
    assert serving.status("late")["state"] == "ready"
