"""Chat templates show how their models write calls and reasoning."""

import pytest

from protocol.answer_formats.families import ALL_MARKERS, FAMILIES, reasoning_tokens, recognise

THINK = ("<think>", "</think>")
# The lines of published templates that write calls and reasoning.
TEMPLATES = [
    (
        """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
        ("hermes", None),
    ),
    (
        """{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}arguments""",
        ("qwen3_coder", None),
    ),
    (
        "{{ '\\n<tool_call>' + tc.name }}{% set arguments = tc.arguments %}<arg_key>{{ k }}</arg_key>"
        "{{ '\\n<think></think>' }}",
        ("glm45", THINK),
    ),
    ("Environment: ipython{{- '<|python_tag|>' + tool_call.name + '.call(' }}", ("llama3", None)),
    ('Environment: ipython {{- \'{"name": "\' + tool_call.name }}', ("llama3", None)),
    ('{{ "[TOOL_CALLS] [" }}{{- tool_call.function|tojson }}', ("mistral", None)),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", ("mistral_args", None)),
    (
        "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}[THINK]..[/THINK]",
        ("mistral_args", ("[THINK]", "[/THINK]")),
    ),
    (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}",
        ("deepseek_v3", None),
    ),
    (
        "{{'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments}}{{'<｜Assistant｜></think>'}}",
        ("deepseek_v31", THINK),
    ),
    (
        "{{- '<|tool_call>call:' + name }}{{- '<|channel>thought\\n<channel|>' -}}",
        ("gemma4", ("<|channel>thought", "<channel|>")),
    ),
    ("<start_function_call>call:{{ name }}", ("function_gemma", None)),
    ("<start_of_turn>user Write calls in ```tool_code", ("gemma3", None)),
    ("<start_of_turn>user\\n{{ content }}<end_of_turn>", (None, None)),
    (
        "{{ '<seed:tool_call>\\n<function=' + name }}<seed:think></seed:think>",
        ("seed_oss", ("<seed:think>", "</seed:think>")),
    ),
    ("""{% set begin = '<minimax:tool_call>' %}<invoke name="{{ name }}"> arguments </think>""", ("minimax_m2", THINK)),
    ("""]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="{{ name }}"> arguments""", ("minimax_m3", None)),
    ("""within <tool_call></tool_call> XML tags {{ '<tool_calls>[{"name": ' }} arguments""", ("apriel", None)),
    ("""{{ '<tool_calls>\\n' }}{{ '{"name": "' + name }}""", ("minimax_m1", None)),
    ("""{{- '<TOOLCALL>[{"name": "' + name }}</TOOLCALL>""", ("nemotron", None)),
    (
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[{'tool_name': }]<|END_ACTION|>",
        ("command_r7b", ("<|START_THINKING|>", "<|END_THINKING|>")),
    ),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>", ("kimi_k2", None)),
    ("<|system|>{{ content }}<|tool|>{{ tools }}<|/tool|>", ("phi4", None)),
    ("respond only with <|tool_call|> followed by a JSON list of tools", ("granite", None)),
    ("List of tools: <|tool_list_start|>[", ("lfm2", None)),
    ("<|im_start|>List of tools: [{{ tool }}]", ("lfm2", None)),
    (
        "Environment: ipython <|python_tag|>{{ '<function=' + name + '>' + arguments + '</function>' }}",
        ("functionary_v31", None),
    ),
    (
        "<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|><|start|>assistant to=functions.",
        ("harmony", ("<|channel|>analysis<|message|>", "<|end|>")),
    ),
    ("<|system|>{{ content }}<|end|>", (None, None)),
    ("<|im_start|>{{ content }}", (None, None)),
    # Llama 4 writes calls as a list of Python calls, which is another format.
    ("Environment: ipython <|python_start|>", (None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("template", "found"), TEMPLATES)
def test_a_template_shows_its_format(template: str, found: tuple[str | None, tuple[str, str] | None]) -> None:
    assert recognise(template) == found


def test_the_template_for_tools_counts() -> None:
    assert recognise("{{ content }}", "<tool_call> arguments") == ("hermes", None)


def test_all_formats_are_recognised() -> None:
    """The format of models whose templates know no tools is not shown by a template."""
    assert {format for _, (format, _) in TEMPLATES} - {None} == set(FAMILIES) - {"json"}


def test_markers_of_the_reasoning_are_known_as_tokens() -> None:
    assert reasoning_tokens(("<|channel>thought", "<channel|>")) == ("<|channel>", "<channel|>")
    assert {"<think>", "<|channel>", "[TOOL_CALLS]", "<｜tool▁sep｜>", '<|"|>'} <= ALL_MARKERS
