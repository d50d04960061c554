"""Items of responses are kept in memory, within bounds, for the key that made them; encrypted reasoning comes back."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.http.body import BodyMemory
from gateway.http.errors import ApiError
from gateway.responses.requests import LIFETIME_S, OVERHEAD, Sealer, StoredItems
from protocol.process.worker_spec import GatewaySettings
from supervisor.config.server import GatewayConfig, gateway_problems
from supervisor.gateway import settings_of, with_seal_secret
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.keyed import free_port
from tests.serving import WITHIN, Serving

ASKED = [{"role": "user", "content": "hello"}]


def response(name: str, text: str = "hi") -> dict[str, Any]:
    return {"id": f"resp_{name}", "output": [{"type": "message", "id": f"msg_{name}", "content": text}]}


def reference(name: str) -> dict[str, Any]:
    return {"input": [{"type": "item_reference", "id": f"msg_{name}"}]}


class Kept:
    """A ``StoredItems`` of 100 kB, 40 kB for each owner, whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bodies = BodyMemory(most=120_000, share=120_000)
        self.items = StoredItems(100_000, 40_000, 20_000, self.bodies, lambda: self.now)

    def put(self, owner: str | None, name: str, size: int = 0) -> None:
        """Keep a response whose item has about so many bytes. The response has as many."""
        self.items.keep(owner, [], response(name, "x" * size))

    def has(self, owner: str | None, name: str) -> bool:
        try:
            return bool(self.items.input_of(owner, reference(name)))
        except ApiError:
            return False


def test_a_reference_is_replaced_by_what_it_names() -> None:
    kept = Kept().items
    kept.keep("a", ASKED, response("1"))
    item = response("1")["output"][0]
    user = {"role": "user", "content": "and now?"}
    assert kept.input_of("a", {"input": [*ASKED, {"type": "item_reference", "id": "msg_1"}, user]}) == [
        *ASKED,
        item,
        user,
    ]
    assert kept.input_of("a", {"input": [{"id": "msg_1"}]}) == [item]
    assert kept.input_of("a", {"input": "text"}) == "text"
    previous = {"previous_response_id": "resp_1"}
    assert kept.input_of("a", previous | {"input": [user]}) == [*ASKED, item, user]
    assert kept.input_of("a", previous | {"input": "more"})[-1]["content"] == "more"


def test_every_reference_that_is_not_kept_gives_the_same_error() -> None:
    kept = Kept()
    kept.put("a", "old")
    kept.now = LIFETIME_S + 1
    kept.put("b", "foreign")
    told = set()
    for name in ("old", "foreign", "unknown"):
        with pytest.raises(ApiError, match="send the items themselves") as caught:
            kept.items.input_of("a", reference(name))
        told.add((caught.value.status, caught.value.code, str(caught.value)))
    assert len(told) == 1
    with pytest.raises(ApiError, match="send the items themselves"):
        kept.items.input_of("a", {"previous_response_id": ["resp_old"]})


def test_the_oldest_go_first_within_a_key_and_in_all() -> None:
    kept = Kept()
    for name in ("1", "2", "3"):
        kept.put("a", name, 8_000)  # 16 kB each, with the response
    assert [kept.has("a", name) for name in ("1", "2", "3")] == [False, True, True]
    for owner in ("b", "c"):
        kept.now += 1
        kept.put(owner, "4", 8_000)
        kept.put(owner, "5", 8_000)
    assert not kept.has("a", "2")
    assert kept.has("c", "5")
    assert kept.items.size <= 100_000
    kept.put("d", "6", 60_000)  # larger than a share
    assert not kept.has("d", "6")
    kept.now = 2 * LIFETIME_S
    assert not kept.has("c", "5")
    assert kept.items.size == 0


def test_what_is_kept_gives_way_to_bodies() -> None:
    kept = Kept()
    kept.put("a", "1", 15_000)
    kept.put("b", "2", 15_000)
    kept.bodies.take("x", 80_000)
    assert kept.items.size <= 40_000
    assert kept.has("b", "2")
    kept.bodies.take("x", 40_000)
    assert kept.items.size == 0
    kept.put("a", "3")
    assert not kept.has("a", "3")
    kept.bodies.give_back("x", 120_000)
    kept.put("a", "3")
    assert kept.has("a", "3")
    assert kept.items.size < 2 * OVERHEAD + 500


def test_a_request_cannot_refer_to_more_than_a_body_may_have() -> None:
    kept = Kept()
    kept.put("a", "1", 9_000)
    with pytest.raises(ApiError, match="send fewer items") as caught:
        kept.items.input_of("a", {"input": reference("1")["input"] * 3})
    assert caught.value.status == 413


def test_settings() -> None:
    assert settings_of(GatewayConfig(), Path()).stored_items == 128 << 20
    assert settings_of(GatewayConfig(stored_items=0), Path()).stored_items == 0
    assert settings_of(GatewayConfig(processes=2), Path()).stored_items == 0
    assert gateway_problems(GatewayConfig(processes=2, stored_items=0)) == []
    ((key, message),) = gateway_problems(GatewayConfig(processes=2, stored_items=1 << 20))
    assert (key, "processes: 1" in message) == ("stored_items", True)
    nothing = StoredItems.of(GatewaySettings(stored_items=0), BodyMemory(1 << 20, 1 << 20))
    nothing.keep("a", [], response("1"))
    assert nothing.size == 0


def test_sealed_reasoning_is_bound_to_secret_caller_and_model() -> None:
    pytest.importorskip("nacl")
    sealer = Sealer(bytes(32), "key", "model")
    sealed = sealer.seal("I think: Łódź")
    assert "think" not in sealed
    assert sealer.unseal(sealed) == "I think: Łódź"
    assert sealer.seal("same") != sealer.seal("same")
    for other in (
        Sealer(bytes(31) + b"x", "key", "model"),
        Sealer(bytes(32), None, "model"),
        Sealer(bytes(32), "key", "m"),
    ):
        assert other.unseal(sealed) is None
    middle = len(sealed) // 2
    changed = sealed[:middle] + ("A" if sealed[middle] != "A" else "B") + sealed[middle + 1 :]
    for foreign in (changed, sealed[:12], "gAAAAA", "mctl1.", "mctl1.ß"):
        assert sealer.unseal(foreign) is None


def test_the_secret_survives_a_restart_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first, second = (with_seal_secret(GatewaySettings(), tmp_path).seal_secret for _ in range(2))
    assert first == second
    file = tmp_path / "gateway-secret"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("something else")
    broken = with_seal_secret(GatewaySettings(), tmp_path).seal_secret
    assert broken not in (first, "something else")
    assert file.read_text() == "something else"
    assert first not in repr(GatewaySettings(seal_secret=first))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[openai.OpenAI]]:
    """Two clients with a key each."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    store = KeyStore(keys)
    tokens = [store.add_token(name, parse_rights("infer")) for name in ("one", "two")]
    port = free_port()
    models = {"local": {"model_dir": ".", "engine": "tests.agent_engine:AgentEngine"}}
    with Serving(models, gateway={"listen": port}, keys=keys), ExitStack() as open_ones:
        url = f"http://127.0.0.1:{port}/v1"
        made = [openai.OpenAI(base_url=url, api_key=token, timeout=WITHIN, max_retries=0) for token in tokens]
        yield [open_ones.enter_context(client) for client in made]


def test_a_conversation_goes_on_by_references(clients: list[openai.OpenAI]) -> None:
    one, two = clients
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    order: Any = {"role": "user", "content": 'call look with {"at": 1}'}
    with one.responses.stream(model="local", input=[order], tools=tools) as stream:
        first = stream.get_final_response()
    assert first.store is True  # type: ignore[attr-defined]
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dark"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = one.responses.create(model="local", input=[order, *references, result], tools=tools)  # type: ignore[list-item]
    by_response = one.responses.create(
        model="local",
        input=[result],
        tools=tools,
        previous_response_id=first.id,  # type: ignore[list-item]
    )
    whole = [order, *(item.to_dict() for item in first.output), result]
    by_items = one.responses.create(model="local", input=whole, tools=tools, store=False)
    assert by_reference.output_text == by_response.output_text == by_items.output_text == "The tool says: dark"
    counted = {each.usage.input_tokens for each in (by_reference, by_response, by_items) if each.usage}
    assert len(counted) == 1
    assert by_response.previous_response_id == first.id
    with pytest.raises(openai.NotFoundError, match="send the items themselves"):
        two.responses.create(model="local", input=references)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="send the items themselves"):
        one.responses.create(model="local", input="and?", previous_response_id=by_items.id)


def test_encrypted_reasoning_brings_the_reasoning_back(clients: list[openai.OpenAI]) -> None:
    pytest.importorskip("nacl")
    one, two = clients
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    order: Any = {"role": "user", "content": 'call look with {"at": 1}'}
    first = one.responses.create(
        model="local", input=[order], tools=tools, store=False, include=["reasoning.encrypted_content"]
    )
    plain = [item.to_dict() for item in first.output]
    assert plain[0]["type"] == "reasoning"
    bare = [{"type": "reasoning", "summary": [], "encrypted_content": plain[0]["encrypted_content"]}, *plain[1:]]
    result: Any = {"type": "function_call_output", "call_id": plain[-1]["call_id"], "output": "dark"}

    def tokens(client: openai.OpenAI, items: Any) -> tuple[int, str | None]:
        got = client.responses.with_raw_response.create(model="local", input=[order, *items, result], tools=tools)
        usage = got.parse().usage
        assert usage is not None
        return usage.input_tokens, got.headers.get("x-modelctl-changed")

    with_text = tokens(one, plain)
    assert tokens(one, bare) == with_text
    fewer, said = tokens(two, bare)
    assert (fewer < with_text[0], said) == (True, "reasoning.encrypted_content")
