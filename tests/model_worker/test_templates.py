"""Chat templates get the right variables, and a client gets a useful error if a template fails."""

import time
from typing import Any

import pytest

from model_worker.engine import ChatTemplate, LoadError
from model_worker.rendering import probe_template
from protocol.errors import ErrorCode, RequestError
from tests.chat import render

SAYS = "{{ messages[0].content }}"


# the variables of templates


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].role }}", "<s>user"),
        ("{{ messages[0]['content'] | trim }}", "a <b>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": " a <b> "}]'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ enable_thinking is defined }}", "False"),
    ],
)  # fmt: skip
def test_what_templates_are_written_for(source: str, text: str) -> None:
    assert render(ChatTemplate(source, {"bos_token": "<s>"}), [{"role": "user", "content": " a <b> "}]) == text


def test_the_time_is_known() -> None:
    year = render(ChatTemplate("{{ strftime_now('%Y') }}"), [{"role": "user", "content": ""}])
    assert abs(int(year) - time.localtime().tm_year) <= 1


def test_tools_calls_and_variables_reach_the_template() -> None:
    source = (
        "{{ tools[0].function.name }} {{ enable_thinking }} {{ messages[0].tool_calls[0].function.arguments.x }} "
        "{{ messages[0].content is defined }} {{ messages[1].tool_call_id }} {{ messages[1].name }}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 7}}}]},
        {"role": "tool", "content": "8", "tool_call_id": "c1", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = render(ChatTemplate(source), messages, tools=tools, template_kwargs={"enable_thinking": False})
    assert text == "f False 7 False c1 f"


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain", {}, "with {{ tools | length }}")
    messages = [{"role": "user", "content": "x"}]
    assert render(template, messages) == "plain"
    assert render(template, messages, tools=[{}]) == "with 1"
    assert render(template, messages, tools=[]) == "plain"


TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "fields", "text"),
    [
        (TURNS, {}, "[user]hi[/][assistant]I am [/][a]"),
        (TURNS, {"add_generation_prompt": False}, "[user]hi[/][assistant]I am [/]"),
        (TURNS, {"continue_final_message": True}, "[user]hi[/][assistant]I am "),
        (
            TURNS.replace("m.content", "m.content | trim"),
            {"continue_final_message": True},
            "[user]hi[/][assistant]I am",
        ),
    ],
)
def test_where_the_assistant_goes_on(source: str, fields: dict[str, Any], text: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am "}]
    assert render(ChatTemplate(source), messages, **fields) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [("nothing of it", "leaves the last message out"), (SAYS, "has no content to continue")],
)
def test_what_cannot_be_continued(source: str, message: str) -> None:
    calls = [{"role": "assistant", "tool_calls": [{}]}]
    messages = [{"role": "user", "content": "x"}, *(calls if source == SAYS else ())]
    with pytest.raises(RequestError, match=message):
        render(ChatTemplate(source), messages, continue_final_message=True)


# templates that fail


SECRET = "the butler, in the pantry, with a 🔪"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the model's chat template refuses: roles must alternate"),
        ("{{ raise_exception('no ' ~ messages[0].content ~ '!') }}", "the model's chat template refuses: no …!"),
        ("{{ raise_exception('no ' ~ messages[0].content[:18]) }}", "the model's chat template refuses: no …"),
        ("{{ raise_exception('x' * 999) }}", "the model's chat template refuses: " + "x" * 300),
        ("{{ [] + messages[0].content }}", "the model's chat template fails: TypeError: can only concatenate list"),
        (
            "{{ {}[messages[0].content].x }}",
            "the model's chat template fails: UndefinedError: 'dict object' has no",
        ),
        ("{{ nobody.nothing }}", "the model's chat template fails: UndefinedError: 'nobody' is undefined"),
        ("a\n{% if %}", "the model's chat template cannot be read: line 2: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "the model's chat template fails: SecurityError: access to attribute"),
        ("{{ messages.append(1) }}", "the model's chat template fails: SecurityError"),
        ("{{ range(10 ** 9) | list }}", "the model's chat template fails: OverflowError"),
        ("{{ '\\ud800' }}", "the model's chat template renders what is not valid Unicode"),
        ("{{ raise_exception('\\ud800 no') }}", "the model's chat template refuses: \\ud800 no"),
        ("{{ {}['\\ud800'].x }}", "the model's chat template fails: UndefinedError: 'dict object' has no"),
        ("{% include 'x' %}", "the model's chat template fails: TypeError: no loader"),
    ],
)
def test_a_template_that_fails_is_the_clients_error_and_quotes_nothing(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(ChatTemplate(source), [{"role": "user", "content": SECRET}])
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "messages")
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 400
    for part in ("butler", "pantry", "🔪"):
        assert part not in str(caught.value)


@pytest.mark.parametrize("template", [("\ud800",), ("x", {"bos_token": "a\udfff"}), ("x", {}, "\ud83d")])
def test_a_template_that_is_no_text_is_refused_when_it_is_read(template: tuple[Any, ...]) -> None:
    with pytest.raises(LoadError, match=r" has \\ud[0-9a-f]{3}, which is one half of a character"):
        ChatTemplate(*template)


@pytest.mark.parametrize("source", ["{{ '\\ud800' }}", "{{ raise_exception('\\ud800') }}"])
def test_a_template_that_always_gives_no_text_takes_no_conversation(source: str) -> None:
    form, _ = probe_template(ChatTemplate(source))
    assert "Unicode" in form.error or "ud800" in form.error


@pytest.mark.parametrize("source", ["{{ 'x' * 10000 }}", "{% for i in range(10000) %}x{% endfor %}", "{{ 'é' * 700 }}"])
def test_a_text_that_no_context_holds_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="more than 1000 bytes") as caught:
        render(ChatTemplate(source), [{"role": "user", "content": "x"}], limit=1000)
    assert (caught.value.code, caught.value.field) == (ErrorCode.CONTEXT_OVERFLOW, "messages")
