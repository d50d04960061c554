"""Aliases, variants and the default model in models.yaml: what a name means, and which names are refused."""

from pathlib import Path

import pytest

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, RequestError
from protocol.names import listed_names_of, means, unknown_among
from supervisor.config.file import load_config
from supervisor.config.rules import ModelNames, Named
from supervisor.config.yaml_source import ConfigError
from supervisor.keys.rights import OWNER, Identity

ENGINE = "model_dir: ., engine: 'tests.deterministic_engine:DeterministicEngine'"


def names(directory: Path, text: str) -> ModelNames:
    file = directory / "models.yaml"
    file.write_text(text)
    return load_config(file).names


def test_a_name_means_a_model_an_alias_or_a_variant(tmp_path: Path) -> None:
    keys = "aliases: [gpt-4o-mini, Org/Model-A], variants: {short: {sampling: {max_tokens: 3}}, plain: {}}"
    found = names(tmp_path, f"models: {{a: {{{ENGINE}, {keys}}}, b: {{{ENGINE}}}}}\ndefault_model: a:short")
    assert [found.find(name).model for name in ("a", "gpt-4o-mini", "Org/Model-A", "b")] == ["a", "a", "a", "b"]
    assert found.find("a").defaults == b""
    assert unpack_body(found.find("gpt-4o-mini:short").defaults) == {"sampling": {"max_tokens": 3}}
    assert found.find("a:plain").defaults == b""
    assert found.find_or_default("", OWNER.may_use) == found.find("a:short")
    assert found.find_or_default("gpt-4o-mini:short", OWNER.may_use).model == "a"
    stranger = Identity("k", models=("b", "gpt*"))
    assert found.find_or_default("b", stranger.may_use).model == "b"
    for hidden in ("a", "gpt-4o-mini", "a:short", "gpt-4o-mini:short"):
        assert found.find_or_default(hidden, stranger.may_use) == Named(hidden), "as one that does not exist"
    with pytest.raises(RequestError, match="no default_model for it"):
        found.find_or_default("", stranger.may_use)
    for unknown in ("c", "a:2", "a:long", "b:short", "A"):
        assert found.find(unknown).model == unknown, "whoever asked for it is told that it does not exist"
    assert found.describe("a") == {
        "aliases": ["gpt-4o-mini", "Org/Model-A"],
        "variants": ["short", "plain"],
        "unlisted": [],
        "default": "a:short",
        "description": None,
    }
    gone = {"aliases": [], "variants": [], "unlisted": [], "default": None, "description": None}
    assert found.describe("gone") == gone


def test_an_unlisted_model_is_found_by_its_names_and_suggested_to_nobody(tmp_path: Path) -> None:
    a = "aliases: [apple], listed: false, variants: {shown: {listed: true}, same: {}}"
    b = "aliases: [bee], variants: {quiet: {listed: false}, loud: {}}"
    found = names(tmp_path, f"models: {{aaaa: {{{ENGINE}, {a}}}, bbbb: {{{ENGINE}, {b}}}}}")
    assert [found.find(name).model for name in ("aaaa", "apple", "aaaa:same", "bbbb:quiet")] == ["aaaa"] * 3 + ["bbbb"]
    assert found.describe("aaaa")["unlisted"] == ["aaaa", "apple", "aaaa:same"]
    assert found.describe("bbbb")["unlisted"] == ["bbbb:quiet"]
    described = [{"name": model} | found.describe(model) for model in ("aaaa", "bbbb")]
    assert [listed_names_of(one) for one in described] == [["aaaa:shown"], ["bbbb", "bee", "bbbb:loud"]]
    assert all(means(described[0], name) for name in ("aaaa", "apple", "aaaa:same", "apple:shown"))
    for error in (found.unknown("zz", OWNER.may_use), unknown_among(described, "zz")):
        assert error.message == "no model 'zz' is configured: there is bbbb"
    for wrong, suggested in {"aaa": None, "appel": None, "aaaa:show": "aaaa:shown", "bbbb:quie": None}.items():
        assert found.nearest(wrong, OWNER.may_use) in (suggested, "bbbb:loud")
        hint = f"did you mean {suggested!r}?" if suggested else ""
        for error in (found.unknown(wrong, OWNER.may_use), unknown_among(described, wrong)):
            assert hint in error.message
            assert not any(repr(name) in error.message for one in described for name in one["unlisted"])


def test_an_alias_may_have_a_colon_as_names_of_ollama_have(tmp_path: Path) -> None:
    keys = "aliases: ['llama3.2:latest', 'hf.co/Org/M:Q4_K_M'], variants: {short: {sampling: {max_tokens: 3}}}"
    found = names(tmp_path, f"models: {{a: {{{ENGINE}, {keys}}}, b: {{{ENGINE}}}}}\ndefault_model: 'llama3.2:latest'")
    assert [found.find(name).model for name in ("llama3.2:latest", "hf.co/Org/M:Q4_K_M", "")] == ["a", "a", ""]
    assert found.find_or_default("", OWNER.may_use) == found.find("a")
    assert unpack_body(found.find("llama3.2:latest:short").defaults) == {"sampling": {"max_tokens": 3}}
    described = {"name": "a"} | found.describe("a")
    assert [means(described, name) for name in ("a", "a:short", "llama3.2:latest", "llama3.2:latest:short")] == [
        True
    ] * 4
    assert [means(described, name) for name in ("llama3.2", "latest", "a:latest", "b", "")] == [False] * 5


def test_without_a_default_model_a_request_has_to_name_one(tmp_path: Path) -> None:
    found = names(tmp_path, f"models: {{a: {{{ENGINE}}}}}")
    with pytest.raises(RequestError, match="the request names no model") as refused:
        found.find_or_default("", OWNER.may_use)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "model")


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ("aliases: [b]", "aliases.0", "is 'b', which is the name of a model already: choose another name"),
        ("aliases: [a]", "aliases.0", "is 'a', which is the name of a model already"),
        ("aliases: [x, x]", "aliases.1", "is 'x', which is an alias of a already"),
        ("aliases: [theirs]", "models.b.aliases.0", "is 'theirs', which is an alias of a already"),
        ("aliases: ['a:p'], variants: {p: {}}", "aliases.0", "is 'a:p', which is the variant p of a already"),
        ("aliases: ['theirs:q']", "aliases.0", "is 'theirs:q', which is the variant q of b already"),
        ("aliases: ['b:2']", "aliases.0", "is 'b:2', which stands for a worker of b: choose another name"),
        ("aliases: [':b']", "aliases.0", "is ':b': use letters, digits,"),
        ("aliases: ['']", "aliases.0", "is '': use letters, digits,"),
        ("aliases: [gateway]", "aliases.0", "is taken: the gateway's own log is called so"),
        ("aliases: x", "aliases", "must be a list"),
        ("variants: {'2': {}}", "variants.2", "is no name of a variant: use a to z"),
        ("variants: {Big: {}}", "variants.Big", "is no name of a variant"),
        ("variants: {p: {temperature: 1}}", "variants.p.temperature", "unknown key"),
        ("variants: {p: {sampling: {temprature: 1}}}", "variants.p.sampling.temprature", "did you mean 'temperature'"),
        ("limits: {max_tokens: 5}, variants: {p: {sampling: {max_tokens: 6}}}", "p.sampling.max_tokens", "at most 5"),
        ("variants: {p: {template_kwargs: {messages: 1}}}", "p.template_kwargs", "the template's own"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, keys: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names(
            tmp_path,
            f"models:\n  a: {{{ENGINE}, {keys}}}\n  b: {{{ENGINE}, aliases: [theirs], variants: {{q: {{}}}}}}\n",
        )
    (problem,) = map(str, caught.value.problems)
    assert f"{key}: " in problem
    assert says in problem
    assert "models.yaml:2: " in problem or "models.yaml:3: " in problem


def test_a_default_model_that_nothing_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="default_model: is 'c': must be a model, an alias, or a variant"):
        names(tmp_path, f"models: {{a: {{{ENGINE}}}}}\ndefault_model: c")
