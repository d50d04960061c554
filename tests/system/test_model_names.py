"""Every way to ask knows aliases, variants and the default model, and a reload changes them without new workers."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import Client
from protocol.errors import ErrorCode, WireError
from tests.deterministic_engine import answer
from tests.gateway.asking import ask
from tests.keyed import Keyed, free_port
from tests.serving import ROOT, engine, wait_until

TEMPLATE = "{{ messages[0].content }}{{ tail }}"
VARIANTS = {
    "short": {"sampling": {"max_tokens": 3}},
    "long": {"sampling": {"max_tokens": 7}, "template_kwargs": {"tail": " indeed"}},
}
FOR = "the letters: 日本"
CHAT = [{"role": "user", "content": "hello"}]


def models(**keys: Any) -> dict[str, dict[str, Any]]:
    own = {"sampling": {"max_tokens": 5}, "aliases": ["gpt-4o-mini", "claude-local"], "variants": VARIANTS} | keys
    entry = engine(**{"description": FOR} | own)
    entry["options"]["template"] = TEMPLATE
    return {"letters": entry, "stories": engine()}


@pytest.fixture
def keyed() -> Iterator[Keyed]:
    port = free_port()
    gateway = {"listen": port, "auth": "none"}
    with Keyed(models(), {"laptop": "infer"}, gateway=gateway, default_model="letters:short") as keyed:
        keyed.gateway_port = port  # type: ignore[attr-defined]
        yield keyed


def refused(client: Client, model: str | None) -> WireError:
    with pytest.raises(WireError) as caught:
        client.complete(model, "hello")
    return caught.value


def test_clients_reach_a_model_by_every_name(keyed: Keyed) -> None:
    with keyed.serving.client() as client:
        lengths = {"letters": 5, "gpt-4o-mini": 5, "letters:short": 3, "claude-local:long": 7, None: 3}
        for name, tokens in lengths.items():
            stream = client.generate(name, "hello")
            assert stream.complete().text == answer("hello", tokens), name
            assert stream.accepted == {"model": "letters", "queue_position": 0}
        assert client.complete("letters:short", "hello", max_tokens=2).text == answer("hello", 2), (
            "a request comes first"
        )
        assert client.complete("letters:long", messages=CHAT).usage["prompt_tokens"] == len("hello indeed")
        assert client.complete("letters:long", messages=CHAT, template_kwargs={"tail": "!"}).usage["prompt_tokens"] == 6
        assert len(client.tokenize("gpt-4o-mini:long", messages=CHAT)) == len("hello indeed")
        assert len(client.tokenize("letters", messages=CHAT)) == len("hello")
        assert len(client.tokenize(None, "hello")) == 5
        assert client.detokenize("claude-local", [104, 105]) == "hi"
        for unknown, hint in (
            ("nosuch", ": there is letters, stories"),
            ("gpt-4o-mni", "; did you mean 'gpt-4o-mini'?"),
            ("letters:none", "; did you mean 'letters:long'?"),
            ("stories:short", "; did you mean 'stories'?"),
            ("lettres", "; did you mean 'letters'?"),
        ):
            error = refused(client, unknown)
            assert (error.code, error.field) == (ErrorCode.MODEL_NOT_FOUND, "model")
            assert error.message == f"no model {unknown!r} is configured{hint}"
            with pytest.raises(WireError) as of_call:
                client.status(unknown)
            assert of_call.value.message == error.message
    assert keyed.serving.order("restart", model="gpt-4o-mini")["state"]


def test_the_rights_of_a_key_are_those_for_the_model_itself(keyed: Keyed) -> None:
    keyed.new("guest", models=("stories",))
    keyed.new("friend", models=("letters",))
    with keyed.client("guest") as guest, keyed.client("friend") as friend:
        for name in ("gpt-4o-mini", "letters:short"):
            assert refused(guest, name).code is ErrorCode.FORBIDDEN
            assert friend.complete(name, "hello").text
        assert "did you mean 'stories'?" in refused(guest, "storys").message
        assert "did you mean" not in refused(guest, "lettrs").message, "the key must not learn of hidden names"
        assert "no default_model for it" in refused(guest, None).message
        assert friend.complete(None, "hello").text
        with pytest.raises(WireError, match="may not use model 'gpt-4o-mini'"):
            guest.tokenize("gpt-4o-mini", "hello")


def test_the_gateway_lists_every_name_and_answers_to_it(keyed: Keyed) -> None:
    port = keyed.gateway_port  # type: ignore[attr-defined]
    listed = {each["id"]: each for each in ask(port, "/v1/models")["data"]}
    assert list(listed) == ["letters", "gpt-4o-mini", "claude-local", "letters:long", "letters:short", "stories"]
    assert {each["modelctl"]["model"] for each in listed.values() if each["id"] != "stories"} == {"letters"}
    assert listed["letters:short"]["modelctl"]["default"]
    assert {name for name, each in listed.items() if each.get("description") == FOR} == {*listed} - {"stories"}
    assert "description" not in listed["stories"]
    assert ask(port, "/v1/models/claude-local:long")["id"] == "claude-local:long"
    for name, tokens in {"claude-local": 5, "letters:long": 7}.items():
        reply = ask(port, "/v1/completions", {"model": name, "prompt": "hello"})
        assert (reply["model"], reply["choices"][0]["text"]) == (name, answer("hello", tokens))
    reply = ask(port, "/v1/chat/completions", {"messages": CHAT})
    assert (reply["model"], reply["usage"]["completion_tokens"]) == ("letters:short", 3)
    assert ask(port, "/tokenize", {"prompt": "hello"})["count"] == 5


@pytest.mark.long
def test_the_commands_show_the_names_and_take_them(keyed: Keyed) -> None:
    serving = keyed.serving
    named = "gpt-4o-mini, claude-local, :long, :short, (default: letters:short)"
    assert named in serving.modelctl("ps").stdout
    shown = serving.modelctl("status", "claude-local").stdout
    assert re.search(f"also called +{re.escape(named)}", shown), shown
    assert re.search(f"description +{FOR}", shown), shown
    for command in ("check", "plan"):
        shown = serving.modelctl(command, str(serving.config))
        assert f"letters is also called: {named}" in shown.stdout, shown.stderr
    assert serving.modelctl("run", "letters:short", "hello", "--raw").stdout.strip() == answer("hello", 3)
    assert serving.modelctl("stop", "gpt-4o-mini").returncode == 0
    serving.wait_state("letters", "stopped")


def test_a_reload_changes_names_without_new_workers(keyed: Keyed) -> None:
    serving = keyed.serving
    before = serving.status("letters")
    assert before["description"] == FOR
    variants = {"short": {"sampling": {"max_tokens": 2}}}
    serving.write_models(models(description="new", aliases=["claude-local", "new"], variants=variants))
    serving.order("reload")
    with serving.client() as client:
        assert client.complete("new:short", "hello").text == answer("hello", 2)
        assert refused(client, "gpt-4o-mini").code is ErrorCode.MODEL_NOT_FOUND
        assert refused(client, "letters:long").code is ErrorCode.MODEL_NOT_FOUND
    after = serving.status("letters")
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
    assert (after["aliases"], after["description"]) == (["claude-local", "new"], "new")


def test_a_model_that_is_not_listed_is_served_by_name_and_shown_to_operators(keyed: Keyed) -> None:
    serving, port = keyed.serving, keyed.gateway_port  # type: ignore[attr-defined]
    pid = serving.status("letters")["pid"]
    variants = {"short": {"sampling": {"max_tokens": 3}}, "long": {"listed": True}}
    serving.write_models({**models(listed=False, variants=variants), "stories": engine()})
    serving.order("reload")
    assert [each["id"] for each in ask(port, "/v1/models")["data"]] == ["letters:long", "stories"]
    assert ask(port, "/v1/models")["data"][0]["modelctl"]["aliases"] == []
    assert ask(port, "/v1/model")["id"] == "letters:short", "the default model is no secret"
    assert ask(port, "/v1/template/list")["data"] == ["stories"]
    assert ask(port, "/v1/models/gpt-4o-mini")["id"] == "gpt-4o-mini"
    reply = ask(port, "/v1/completions", {"model": "letters:short", "prompt": "hello"})
    assert reply["choices"][0]["text"] == answer("hello", 3)
    with serving.client() as client:
        assert refused(client, "nosuch").message == "no model 'nosuch' is configured: there is stories"
        assert "did you mean 'letters:long'?" in refused(client, "lettrs:long").message
        assert "gpt-4o-mini" not in refused(client, "gpt-4o-mni:long").message
    shown = serving.status("letters")
    assert (shown["pid"], shown["aliases"]) == (pid, ["gpt-4o-mini", "claude-local"])
    assert shown["unlisted"] == ["letters", "gpt-4o-mini", "claude-local", "letters:short"]
    assert "letters" in serving.modelctl("ps").stdout
    words = f"modelctl stop --runtime-dir {serving.runtime_dir} "
    shell = {"_MODELCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "4"}

    def offered() -> list[str]:
        program = [sys.executable, "-m", "supervisor"]
        run = subprocess.run(program, env=serving.environment | shell, cwd=ROOT, capture_output=True, text=True)
        return run.stdout.split()

    # On a busy machine the supervisor may need longer than the second that the shell waits.
    wait_until(lambda: offered() == ["plain,stories"], what="the listed names")


def test_variables_of_the_template_are_a_models_a_variants_or_a_requests(keyed: Keyed) -> None:
    serving, port = keyed.serving, keyed.gateway_port  # type: ignore[attr-defined]
    before = serving.status("letters")
    variants = {"short": {"sampling": {"max_tokens": 3}}, "long": {"template_kwargs": {"tail": " at length"}}}
    serving.write_models(models(template_kwargs={"tail": " indeed"}, variants=variants))
    serving.order("reload")
    assert serving.status("letters")["pid"] == before["pid"]
    own = {"template_kwargs": {"tail": "!"}}
    with serving.client() as client:
        for name, given, seen in (
            ("letters", {}, "hello indeed"),
            ("gpt-4o-mini", {}, "hello indeed"),
            ("letters:short", {}, "hello indeed"),
            ("letters:long", {}, "hello at length"),
            ("letters", own, "hello!"),
            ("letters:long", own, "hello!"),
        ):
            assert client.complete(name, messages=CHAT, **given).usage["prompt_tokens"] == len(seen), name
            assert len(client.tokenize(name, messages=CHAT, **given)) == len(seen), name
    reply = ask(port, "/v1/chat/completions", {"model": "letters", "messages": CHAT})
    assert reply["usage"]["prompt_tokens"] == len("hello indeed")
    serving.write_models(models(template_kwargs={"messages": []}))
    with pytest.raises(WireError, match=r"models\.letters\.template_kwargs: must not set variables"):
        serving.order("reload")


def test_a_reload_of_one_model_refuses_a_name_that_another_model_still_has(keyed: Keyed) -> None:
    serving = keyed.serving
    moved = models(aliases=[])
    moved["stories"]["aliases"] = ["claude-local"]
    serving.write_models(moved)
    with pytest.raises(WireError, match=r"models.stories.aliases.0 is 'claude-local', which is an alias of letters"):
        serving.order("reload", model="stories")
    assert serving.status("stories")["aliases"] == []
    serving.order("reload")
    with serving.client() as client:
        assert client.generate("claude-local", "hello", max_tokens=1).complete().text
        stream = client.generate("claude-local", "hello", max_tokens=1)
        stream.complete()
        assert stream.accepted is not None
        assert stream.accepted["model"] == "stories"
