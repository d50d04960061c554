"""A conversation is put into the form that a chat template can take, and loses no word of it.

Each template here has one trait of real ones. The conversations are rendered in the real process, as in a worker.
"""

import json
import re
from typing import Any

import pytest

from model_worker.engine import ChatTemplate
from model_worker.rendering import NINE, TemplateForm, UnfitError, adapt
from protocol.errors import RequestError
from tests.chat import format_of, render

Message = dict[str, Any]
ARGUMENTS = {"city": "Łódź", "days": {"from": 1}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": {"type": "object"}}}
]
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ ARGS }}}\n</tool_call>{% endfor %}'
)
MAP = "c.function.arguments | tojson"
EITHER = "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"
FAIL = "{{ raise_exception('no') }}"


def template(body: str = "{{ m.content or '' }}" + CALLS, before: str = "", arguments: str = EITHER) -> ChatTemplate:
    """Return a template that writes each message as <|role|>BODY<|end|>."""
    return ChatTemplate(
        before
        + "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        + body.replace("ARGS", arguments)
        + "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def call(*ids: str, arguments: Any = TEXT, **more: Any) -> Message:
    calls = [{"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def user(text: str = "hello") -> Message:
    return {"role": "user", "content": text}


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def rendered(of: ChatTemplate, *messages: Message, **fields: Any) -> str:
    return render(of, list(messages), forms=format_of(of).forms, **fields)


def test_a_template_that_takes_everything_gets_the_conversation_unchanged() -> None:
    source = template("{{ m.reasoning_content or '' }}{{ m.content or '' }}" + CALLS + "{{ m.tool_call_id or '' }}")
    form = format_of(source).forms[0]
    assert form.changes() == []
    assert form.turn_ends == ("<|end|>", "<|end|><|user|>")
    messages = [system("a"), system("b", "developer"), user(), call("1", "2", content="so"), result("1", "x")]
    messages += [result("2", "y"), system("c"), user()]
    adapted, tools = adapt(messages, TOOLS, form)
    assert (adapted, tools) == (messages, TOOLS)


# calls


@pytest.mark.parametrize(
    ("body", "given", "written"),
    [
        # a filter that takes no null, as `| trim` or `in`
        ("{{ m.content | trim }}" + CALLS, {}, "<|assistant|><tool_call>"),
        ("{% if '</think>' in m.content %}{% endif %}{{ m.content }}" + CALLS, {}, "<|assistant|><tool_call>"),
        # writes None, unless the key is missing
        ("{{ m.content }}" + CALLS, {}, "<|assistant|><tool_call>"),
        # shows calls only beside a null
        ("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}", {}, "<|assistant|><tool_call>"),
        ("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}", {"content": ""},
         "<|assistant|><tool_call>"),
        # shows a text or calls, not both: the text becomes a message of its own
        ("{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content or '' }}{% endif %}", {"content": "so"},
         "<|assistant|>so<|end|><|assistant|><tool_call>"),
    ],
)  # fmt: skip
def test_a_call_without_a_text(body: str, given: Message, written: str) -> None:
    of = template(body)
    text = rendered(of, user(), call("c1", **given), result("c1", "dry"), user("thanks"))
    assert written in text
    assert "None" not in text
    assert "null" not in text
    assert text.endswith(f"{TEXT}}}\n</tool_call><|end|><|tool|>dry<|end|><|user|>thanks<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("written_by", "arguments", "written"),
    [
        (MAP, TEXT, TEXT),
        (MAP, json.dumps(TEXT), TEXT),  # encoded twice
        (MAP, TEXT[:-3], json.dumps({"arguments": TEXT[:-3]}, ensure_ascii=False)),  # cut
        (MAP, "null", '{"arguments": "null"}'),
        (MAP, "[1]", '{"arguments": "[1]"}'),
        (MAP, "", "{}"),
        (MAP, "[" * 50_000, None),
        ("'' + c.function.arguments", ARGUMENTS, TEXT),
        ("'' + c.function.arguments", TEXT[:-3], TEXT[:-3]),
        (EITHER, TEXT, TEXT),
        (EITHER, ARGUMENTS, TEXT),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(written_by: str, arguments: Any, written: str | None) -> None:
    text = rendered(template(arguments=written_by), user(), call("c1", arguments=arguments), result("c1", "dry"))
    assert f'"arguments": {written}}}' in text or written is None
    assert "dry" in text


def test_inner_maps_that_a_template_would_write_as_python_are_json() -> None:
    body = (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v | string }}</parameter>{% endfor %}"
        "</function>{% endfor %}"
    )
    text = rendered(template(body), user(), call("c1"), result("c1", "dry"))
    assert '<parameter=city>Łódź</parameter><parameter=days>{"from": 1}</parameter>' in text


def test_ids_of_nine_characters() -> None:
    check = f"{{% if c.id | length != 9 %}}{FAIL}{{% endif %}}"
    of = template("{{ m.content or '' }}" + CALLS.replace("<tool_call>", check + "<tool_call>{{ c.id }}") +
                  "{{ m.tool_call_id }}")  # fmt: skip
    first = rendered(of, user(), call("call_1", "abcdefGH1"), result("call_1", "x"), result("abcdefGH1", "y"))
    ids = re.findall("<tool_call>(.{9})", first)
    assert NINE.fullmatch(ids[0])
    assert ids[1] == "abcdefGH1"
    assert [f"<|tool|>{text}{id}<|end|>" in first for text, id in zip("xy", ids, strict=True)] == [True, True]
    later = rendered(of, user("more"), call("other"), result("other", "z"), call("call_1"), result("call_1", "x"))
    assert ids[0] in later
    many = [f"toolu_{i}" for i in range(2000)]
    adapted, _ = adapt([call(*many)], None, TemplateForm(nine=True))
    assert len({one["id"] for one in adapted[0]["tool_calls"]}) == 2000


def test_a_template_that_takes_one_call_gets_each_call_with_its_result() -> None:
    of = template("{% if m.tool_calls and m.tool_calls | length > 1 %}" + FAIL + "{% endif %}{{ m.content or '' }}"
                  + CALLS)  # fmt: skip
    format = format_of(of)
    assert (format.parallel, format.tools) == (False, "hermes")
    text = rendered(of, user(), call("1", "2", content="so"), result("2", "second"), result("1", "first"), user("ok"))
    call_text = f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>'
    assert text == (
        f"<|user|>hello<|end|><|assistant|>so{call_text}<|end|><|tool|>first<|end|>"
        f"<|assistant|>{call_text}<|end|><|tool|>second<|end|><|user|>ok<|end|><|assistant|>"
    )


def test_an_empty_list_of_calls_is_none() -> None:
    of = template(f"{{% if m.tool_calls is defined and not m.tool_calls %}}{FAIL}{{% endif %}}{{{{ m.content or '' }}}}"
                  + CALLS)  # fmt: skip
    assert "hi<|end|>" in rendered(of, user(), {"role": "assistant", "content": "hi", "tool_calls": []}, user())


# the roles


PLAIN = template("{{ m.content }}")
NOTE = "<system-reminder>\nnote\n</system-reminder>"
FIRST_ONLY = template(
    f"{{% if m.role == 'system' and not loop.first %}}{FAIL}{{% endif %}}{{{{ m.content or '' }}}}" + CALLS
)
NO_SYSTEM = template(
    "{{ m.content or '' }}" + CALLS,
    before=f"{{% for m in messages if m.role not in ['user', 'assistant', 'tool'] %}}{FAIL}{{% endfor %}}",
)
ALTERNATING = template(
    "{{ m.content }}",
    before="{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + FAIL
    + "{% endif %}{% endfor %}",
)


def test_system_messages_where_a_template_takes_one_at_the_beginning() -> None:
    talk = [system("a"), system("b", "developer"), user(), system("note"), {"role": "assistant", "content": "hi"}]
    talk += [system("note"), user("more")]
    assert rendered(FIRST_ONLY, *talk) == (
        f"<|system|>a\n\nb<|end|><|user|>hello\n\n{NOTE}<|end|><|assistant|>hi<|end|>"
        f"<|user|>{NOTE}\n\nmore<|end|><|assistant|>"
    )
    text = rendered(FIRST_ONLY, user(), call("1"), system("note"), result("1", "dry"), system("note"))
    assert text.endswith(f"<|tool|>dry\n\n{NOTE}\n\n{NOTE}<|end|><|assistant|>")
    assert rendered(FIRST_ONLY, user(), {"role": "assistant", "content": "hi"}, system("note")).endswith(
        f"hi<|end|><|user|>{NOTE}<|end|><|assistant|>"
    )


def test_system_messages_where_a_template_takes_none() -> None:
    text = rendered(NO_SYSTEM, system("a"), system("b"), user(), system("note"))
    assert text == f"<|user|>a\n\nb\n\nhello\n\n{NOTE}<|end|><|assistant|>"
    assert rendered(NO_SYSTEM, system("a")) == "<|user|>a<|end|><|assistant|>"


def test_turns_of_one_role_where_a_template_wants_them_to_alternate() -> None:
    text = rendered(ALTERNATING, system("a"), user(), user("b"), {"role": "assistant", "content": "c"},
                    {"role": "assistant", "content": "d"}, user("e"))  # fmt: skip
    assert text == "<|user|>a\n\nhello\n\nb<|end|><|assistant|>c\n\nd<|end|><|user|>e<|end|><|assistant|>"


def test_a_user_behind_a_result_where_a_template_takes_none() -> None:
    of = template("{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}" + FAIL
                  + "{% endif %}{{ m.content or '' }}" + CALLS)  # fmt: skip
    text = rendered(of, user(), call("1"), result("1", "dry"), user("and now?"))
    assert text.endswith("<|tool|>dry\n\nand now?<|end|><|assistant|>")


def test_a_template_that_takes_lists_of_parts() -> None:
    of = template("{% for p in m.content %}{{ p.text }}{% endfor %}")
    text = rendered(of, system("a"), user(), {"role": "assistant", "content": "c"}, user("d"))
    assert text == "<|system|>a<|end|><|user|>hello<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    assert format_of(of).forms[0].parts == ("system", "user", "assistant", "tool")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_the_name_that_the_template_knows(key: str) -> None:
    of = template(f"{{{{ m.{key} or '' }}}}|{{{{ m.content or '' }}}}" + CALLS)
    said = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    assert "<|assistant|>hm|hi<|end|>" in rendered(of, user(), said, user("more"))


def test_an_answer_can_be_continued_in_each_form() -> None:
    for of in (FIRST_ONLY, ALTERNATING, template("{% for p in m.content %}{{ p.text }}{% endfor %}")):
        messages = [system("a"), user(), {"role": "assistant", "content": "It is "}]
        assert rendered(of, *messages, continue_final_message=True).endswith("<|assistant|>It is ")


# tools


def test_tools_have_their_keys_in_the_usual_order() -> None:
    schema = {"type": "object"}
    odd = {"function": {"strict": True, "parameters": schema, "description": "Tell it.", "name": "weather"},
           "type": "function"}  # fmt: skip
    _, tools = adapt([user()], [odd], TemplateForm())
    assert json.dumps(tools) == json.dumps(
        [{"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": schema,
                                           "strict": True}}]
    )  # fmt: skip
    bare = template(
        "{{ m.content or '' }}" + CALLS, before="{% for t in tools or [] %}{{ t.name }}: {{ t.parameters }}{% endfor %}"
    )
    source = ChatTemplate(bare.source.replace("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", ""))
    assert rendered(source, user(), tools=TOOLS).startswith("weather: {'type': 'object'}<|user|>")


def test_a_template_without_calls_gets_them_as_texts() -> None:
    of = ChatTemplate(PLAIN.source.replace("{{ t | tojson }}", ""))
    format = format_of(of)
    assert (format.tools, format.tried) == ("json", True)
    assert format.template_changes == "tools, calls and results as texts of the format json"
    text = rendered(of, system("a"), user(), call("1", content="so"), result("1", "dry"), tools=TOOLS)
    for part in ("<|system|>a\n\n", '"name": "weather"', f'so\n{{"name": "weather", "arguments": {TEXT}}}<|end|>',
                 "<|user|>Result of weather:\ndry<|end|>"):  # fmt: skip
        assert part in text


def test_a_template_that_shows_tools_and_no_calls_gets_the_calls_as_texts() -> None:
    of = ChatTemplate("<tool_call> arguments" + PLAIN.source)
    format = format_of(of)
    assert (format.tools, format.tried) == ("hermes", False)
    text = rendered(of, user(), call("1"), result("1", "dry"), tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text
    assert text.endswith(f"{TEXT}}}<|end|><|user|>Result of weather:\ndry<|end|><|assistant|>")


def test_calls_that_cannot_be_shown_are_refused_by_name() -> None:
    with pytest.raises(UnfitError, match="does not show calls of tools: leave out tool_calls"):
        adapt([user(), call("1")], None, TemplateForm(calls=False))
    with pytest.raises(RequestError, match="shows no text beside calls"):
        render(PLAIN, [user(), call("1", content="so")], forms=[TemplateForm(text_beside_calls=False)] * 2)


# the format of calls is claimed only if it was tried


def test_a_format_is_claimed_if_its_reader_reads_the_template_s_call() -> None:
    assert format_of(template()).tools == "hermes"
    listed = template("{{ m.content or '' }}{% if m.tool_calls %}<tool_call>[{% for c in m.tool_calls %}"
                      '{"name": "{{ c.function.name }}", "args": {{ c.function.arguments | tojson }}}'
                      "{% endfor %}]</tool_call>{% endif %}{# arguments #}")  # fmt: skip
    assert format_of(listed).tools is None


# templates that render nothing, or too slowly


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no conversations') }}", "no conversations"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "it shows no user's words|2 s",
        ),
        ("constant", "it shows no user's words"),
    ],
)
def test_a_template_that_fails_every_probe(source: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.rendering.LEASE_S", 60.0)  # on a busy machine, 2 s of processor time last long
    format = format_of(ChatTemplate(source))
    assert re.search(why, format.template_error)
    assert format.template_changes == f"completions only: {format.template_error}"


def test_a_form_from_a_process_that_was_taken_over_is_checked() -> None:
    good = TemplateForm().to_wire()
    for bad in (None, {}, good | {"more": 1}, good | {"nine": 1}, good | {"parts": [1]}, good | {"error": None}):
        with pytest.raises(ValueError, match=r"no form|more|nine|parts|error"):
            TemplateForm.from_wire(bad)
    assert TemplateForm.from_wire(json.loads(json.dumps(good))) == TemplateForm()
