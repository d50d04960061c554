"""Options that other servers know and clients send: each is used, refused by name, or ignored, never by accident."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.http.answers import Notes
from gateway.http.errors import ApiError
from gateway.openai.foreign_options import IGNORED, NO_EFFECT, NOT_OFFERED, SYNONYMS, nearest
from gateway.openai.requests import KNOWN, ApiRequest, read_chat, read_completion
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ACCEPTED: dict[str, dict[str, Any]] = {
    "openai, both": {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "max_tokens": 5, "n": 1, "seed": 7,
        "stop": ["a", "b"], "stream": False, "stream_options": {"include_usage": True, "include_obfuscation": False},
        "temperature": 1, "top_p": 1, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "best_of": 1,
        "prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {},
    },
    "openai, chat": {
        "audio": None, "function_call": "none", "functions": [], "logprobs": False, "modalities": ["text"],
        "parallel_tool_calls": True, "reasoning_effort": "low", "response_format": {"type": "text"}, "tools": [TOOL],
        "tool_choice": "auto", "verbosity": "medium", "max_completion_tokens": 5, "max_tokens": 5,
    },
    "openai, completion": {"echo": False, "suffix": "", "logprobs": None, "best_of": 1},
    "vllm": {
        "use_beam_search": False, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
        "allowed_token_ids": None, "bad_words": [], "add_special_tokens": True, "guided_json": None,
        "structured_outputs": None, "guided_decoding_backend": "auto", "priority": 0, "request_id": "r",
        "logits_processors": None, "return_tokens_as_token_ids": False, "return_token_ids": False, "cache_salt": None,
        "kv_transfer_params": None, "vllm_xargs": None, "detokenize": True, "structural_tag": None,
    },
    "vllm, chat": {
        "add_generation_prompt": True, "continue_final_message": False, "documents": None, "chat_template": None,
        "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": None, "include_reasoning": True,
        "thinking_token_budget": 5, "echo": False,
    },
    "guidellm": {
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True,
        "max_tokens": 5, "max_completion_tokens": 5, "stop": None,
    },
    "aiperf": {"stream": True, "min_tokens": 1, "max_completion_tokens": 5, "ignore_eos": True, "nvext": {"a": 1}},
    "lm-eval": {"max_tokens": 5, "temperature": 0, "stop": ["\n\n", ""], "seed": 1234, "do_sample": False},
    "lmdeploy": {
        "session_id": -1, "ignore_eos": False, "top_k": 40, "random_seed": 1, "min_new_tokens": 1,
        "adapter_name": None, "return_token_ids": False, "with_cache": False, "preserve_cache": False,
        "migration_request": None, "logits_processors": None, "skip_special_tokens": True,
    },
    "sglang": {
        "ebnf": None, "no_stop_trim": False, "stop_regex": None, "separate_reasoning": True, "stream_reasoning": True,
        "lora_path": None, "rid": None, "extra_key": None, "return_hidden_states": False, "bootstrap_host": None,
        "custom_logit_processor": None,
    },
    "llama-server": {
        "n_predict": 5, "repeat_penalty": 1.0, "repeat_last_n": -1, "typical_p": 1.0, "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0, "cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "n_keep": 0, "n_probs": 0,
        "t_max_predict_ms": 0, "timings_per_token": True, "return_progress": False, "return_tokens": False,
        "post_sampling_probs": False, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "grammar": "",
        "xtc_probability": 0.0, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":"], "top_n_sigma": -1.0,
        "min_keep": 0, "lora": [], "response_fields": [], "reasoning_format": "auto", "sse_ping_interval": 10,
        "parse_tool_calls": True, "n_indent": 0, "n_discard": 0, "seed": -1, "n_cmpl": 1, "verbose": False,
    },
    "tabbyapi": {
        "max_length": 5, "min_length": 0, "generate_window": 512, "stop_sequence": ["x"], "banned_strings": [],
        "banned_tokens": "", "allowed_tokens": [], "token_healing": False, "temperature_last": True, "top_a": 0,
        "smoothing_factor": 0, "tfs": 1, "typical": 1, "skew": 0, "rep_pen": 1.0, "rep_pen_range": -1,
        "repetition_decay": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_range": 0,
        "mirostat_mode": 0, "add_bos_token": True, "ban_eos_token": False, "negative_prompt": "", "json_schema": None,
        "regex_pattern": None, "grammar_string": "", "speculative_ngram": False, "guidance_scale": 1.0,
        "dynatemp_low": 1.0, "dynatemp_high": 1.0, "xtc_threshold": 0.1,
    },
    "tabbyapi, chat": {
        "prompt_template": None, "template_vars": {"a": 1}, "response_prefix": "", "reasoning_budget_tokens": 5,
        "reasoning_budget": 5, "enable_thinking": True,
    },
    "SillyTavern": {
        "max_new_tokens": 5, "max_tokens": 5, "temperature": 1, "top_p": 1, "typical_p": 1, "typical": 1,
        "sampler_seed": -1, "seed": -1, "min_p": 0, "repetition_penalty": 1, "rep_pen": 1, "frequency_penalty": 0,
        "presence_penalty": 0, "top_k": 0, "skew": 0, "min_length": 0, "min_tokens": 0, "num_beams": 1,
        "length_penalty": 1, "early_stopping": False, "add_bos_token": True, "dynamic_temperature": False,
        "dynatemp_low": 0.5, "dynatemp_high": 2, "dynatemp_range": 0, "dynatemp_exponent": 1, "smoothing_factor": 0,
        "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75,
        "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]', "dry_penalty_last_n": 0, "max_tokens_second": 0,
        "sampler_priority": ["top_k"], "samplers": ["top_k"], "sampler_order": [6, 0], "stopping_strings": ["\nYou:"],
        "stop": ["\nYou:"], "truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True,
        "include_reasoning": False, "top_a": 0, "tfs": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat_mode": 0,
        "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [], "api_type": "tabby",
        "api_server": "http://x", "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0,
        "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9, "rep_pen_range": 0,
        "repetition_penalty_range": None, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
        "penalty_alpha": 0, "temperature_last": True, "speculative_ngram": False, "do_sample": True,
        "guidance_scale": 1, "negative_prompt": "", "grammar_string": "", "json_schema": None, "trim_stop": True,
        "n": 1, "minimum_message_content_tokens": 1,
    },
    "KoboldAI": {
        "max_context_length": 4096, "max_length": 5, "rep_pen": 1.0, "rep_pen_range": 256, "rep_pen_slope": 1,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5], "sampler_seed": 3, "singleline": False, "tfs": 1, "top_a": 0,
        "typical": 1, "use_default_badwordsids": False, "quiet": True, "genkey": "g", "trim_stop": True,
        "render_special": False, "bypass_eos": False, "memory": "", "images": [], "use_story": False,
        "use_memory": False, "use_authors_note": False, "use_world_info": False, "frmttriminc": False,
        "frmtrmblln": False, "disable_input_formatting": True, "stop_sequence": ["You:"], "nsigma": 0,
    },
    "OpenRouter, LiteLLM": {
        "provider": {"order": ["a"]}, "models": ["m"], "route": "fallback", "transforms": [], "plugins": [],
        "usage": {"include": True}, "structured_outputs": True, "include_reasoning": True, "drop_params": True,
        "num_retries": 1, "litellm_session_id": "s", "caching": True,
    },
    "Ollama": {"num_predict": 5, "num_ctx": 4096, "repeat_last_n": 64, "tfs_z": 1.0},
}  # fmt: skip
"""Keys with typical values, by the program that sends or documents them."""
CHATS_ONLY = {name for name in ACCEPTED if name.endswith(", chat")}
SAID = {"include_reasoning", "samplers", "sampler_order", "sampler_priority", "models", "route"}
"""Keys of these that are said to be ignored."""

REFUSED: dict[str, Any] = {
    "audio": {"voice": "v"}, "modalities": ["audio"], "functions": [{}], "function_call": {"name": "f"},
    "web_search_options": {}, "suffix": "x", "best_of": 2, "use_beam_search": True, "num_beams": 4,
    "length_penalty": 0.5, "early_stopping": True, "include_stop_str_in_output": True, "no_stop_trim": True,
    "skip_special_tokens": False, "render_special": True, "detokenize": False, "return_token_ids": True,
    "return_tokens": True, "return_tokens_as_token_ids": True, "return_hidden_states": True,
    "truncate_prompt_tokens": 5, "add_bos_token": False, "bad_words": ["x"], "stop_regex": "x", "n_probs": 5,
    "documents": [{}], "chat_template": "{{ x }}", "prompt_template": "x", "guided_grammar": "root ::= x",
    "grammar": "root ::= x", "grammar_string": "x", "ebnf": "x", "structural_tag": {"a": 1},
    "logits_processors": ["x"], "custom_logit_processor": "x", "lora": [{"id": 1}], "lora_path": "x",
    "adapter_name": "x", "images": ["x"], "input_ids": [1], "t_max_predict_ms": 5, "response_fields": ["content"],
    "dynatemp_range": 0.5, "top_n_sigma": 1.0, "nsigma": 1, "epsilon_cutoff": 3, "eta_cutoff": 3, "min_keep": 3,
    "penalty_alpha": 0.6, "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "rep_pen_slope": 0.7,
    "smoothing_curve": 2, "adaptive_target": 0.5, "max_tokens_second": 5, "bypass_eos": True, "input_embeds": [[1.0]],
    "prompt_embeds": "x", "repetition_detection": {"a": 1}, "num_beam_groups": 2, "moderation": {"a": 1},
}  # fmt: skip
"""Options that are known and not offered, with a value that asks for something."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    with Serving({"m": engine()}, gateway={"listen": port, "auth": "none"}) as serving:
        serving.wait_idle("m")
        yield port


def ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, http.client.HTTPMessage, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def chat(more: dict[str, Any], notes: Notes | None = None) -> dict[str, Any]:
    return dict(read_chat(CHAT | more, notes or Notes()).options)


def completion(more: dict[str, Any], notes: Notes | None = None) -> ApiRequest:
    return read_completion({"model": "m", "prompt": "x"} | more, notes or Notes())[1]


@pytest.mark.parametrize("client", ACCEPTED)
def test_a_clients_keys_are_answered_all_together_and_each_alone(port: int, client: str) -> None:
    """The engine of this test draws no tokens at random, so that it has not all options."""
    keys = ACCEPTED[client]
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "m", "prompt": "x"})):
        is_chat = path == "/v1/chat/completions"
        if (not is_chat and client in CHATS_ONLY) or (is_chat and client.endswith(", completion")):
            continue
        read = read_chat if is_chat else read_completion
        for body in (keys, *({name: value} for name, value in keys.items())):
            notes = Notes()
            read(base | body, notes)
            said = set(notes.ignored.split(", ")) - {"", "stream_options.continuous_usage_stats"}
            assert said <= SAID, body
        offered = {name: value for name, value in keys.items() if SYNONYMS.get(name, name) not in UNOFFERED}
        status, _, answer = ask(port, path, base | {"max_tokens": 5} | offered)
        assert status == 200, answer


UNOFFERED = {"tools", "reasoning_budget", "ignore_eos", "top_k", "dry_sequence_breakers", "token_healing"}
"""What the engine of this test does not offer, or its template does not show."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name_with_a_remedy(name: str) -> None:
    for read, base in ((read_chat, CHAT), (read_completion, {"model": "m", "prompt": "x"})):
        with pytest.raises(ApiError) as refused:
            read(base | {name: REFUSED[name]}, Notes())
        assert (refused.value.param, refused.value.code) == (name, "unsupported")
        begun = f"{name} is not offered: "
        assert refused.value.message.startswith(begun)
        assert "not offered" not in refused.value.message.removeprefix(begun), "the remedy repeats the error"


def test_the_tables_name_each_option_once_and_all_of_them_are_tested() -> None:
    tables = [set(SYNONYMS), set(NOT_OFFERED), set(NO_EFFECT), set(IGNORED), set(KNOWN)]
    for i, table in enumerate(tables):
        for other in tables[i + 1 :]:
            assert not table & other - {"template_kwargs", "prompt_logprobs", "echo"}
    assert set(NOT_OFFERED) - set(REFUSED) <= {"echo", "prompt_logprobs", "add_special_tokens"}
    assert set(SYNONYMS.values()) <= KNOWN


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"stopping_strings": ["a", ""]}, {"stop": ["a"]}),
        ({"stop": [""]}, {"stop": []}),
        ({"max_tokens": -1, "seed": -1}, {}),
        ({"n_predict": -1}, {}),
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"top_p": 0, "temperature": 1}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"custom_token_bans": "3, 4"}, {"banned_tokens": [3, 4]}),
        ({"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a+", "backend": "x"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": "{}"}}, {"json_schema": "{}"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"choice": ["a"]}, "guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"best_of": 3, "n": 3}, {}),
        ({"dry_sequence_breakers": '"a", "b"'}, {"dry_sequence_breakers": ["a", "b"]}),
        ({"dynatemp_low": 0.5, "dynatemp_high": 2, "dynatemp_range": 0.75}, {"min_temp": 0.5, "max_temp": 2}),
        ({"typical": 0.9, "typical_p": 0.9}, {"typical_p": 0.9}),
        ({"temperature": 1, "repetition_penalty": 1, "rep_pen": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.0}),
    ],
)
def test_synonyms_mean_what_they_mean_elsewhere(more: dict[str, Any], options: dict[str, Any]) -> None:
    for found in (chat(more), dict(completion(more).options)):
        found.pop("messages", None)
        assert {name: found[name] for name in found if name not in ("with_format", "cut_to_context")} == options


@pytest.mark.parametrize(
    ("more", "variables", "budget"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}, None),
        ({"think": True}, {"enable_thinking": True, "thinking": True}, None),
        ({"think": "high"}, {"reasoning_effort": "high"}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}, 9),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}, None),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}, None),
        ({"reasoning": {"max_tokens": 9}}, None, 9),
        ({"thinking_budget": 9, "reasoning": {"max_tokens": 9}}, None, 9),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
            None,
        ),
        ({"verbosity": "low"}, {"verbosity": "low"}, None),
        ({"template_vars": {"a": 1}, "think": False}, {"a": 1, "enable_thinking": False, "thinking": False}, None),
        (
            {"chat_template_kwargs": {"thinking": True}, "think": False},
            {"enable_thinking": False, "thinking": True},
            None,
        ),
    ],
)
def test_all_words_for_reasoning_are_understood(
    more: dict[str, Any], variables: dict[str, Any] | None, budget: int | None
) -> None:
    options = chat(more)
    assert (options.get("template_kwargs"), options.get("reasoning_budget")) == (variables, budget)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stop": ["a"], "stopping_strings": ["b"]}, "stopping_strings"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"thinking_budget": 5, "reasoning_budget": 6}, "reasoning_budget"),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
        ({"thinking": "maybe"}, "thinking.type"),
        ({"think": 5}, "think"),
        ({"reasoning": "x"}, "reasoning"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs.regex"),
        ({"custom_token_bans": "a"}, "custom_token_bans"),
        ({"dry_sequence_breakers": '["a'}, "dry_sequence_breakers"),
        ({"response_prefix": 5}, "response_prefix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
        ({"repetition_penlaty": 1}, "repetition_penlaty"),
        ({"to_p": 1}, "to_p"),
        ({"stoping_strings": ["x"]}, "stoping_strings"),
        ({"on_behalf_of": "0" * 64}, "on_behalf_of"),
        ({"trace_ids": ["x"]}, "trace_ids"),
        ({"notes": ["x"]}, "notes"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_has_no_meaning_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(more)
    assert refused.value.param == param


def test_a_typing_error_gets_a_suggestion_and_an_unknown_option_does_not() -> None:
    for name, known in {
        "temprature": "temperature", "max_tokns": "max_tokens", "tempreature": "temperature", "toolz": "tools",
        "sotp": "stop", "repetition_penlaty": "repetition_penalty",
    }.items():  # fmt: skip
        with pytest.raises(ApiError, match=f"unknown option '{name}': did you mean {known}"):
            chat({name: 1})
    notes = Notes()
    chat({"brand_new_option": 1, "x": 2, "another": None}, notes)
    assert notes.ignored == "brand_new_option, x"


def test_many_unknown_options_cost_little() -> None:
    body = {f"unknown_option_number_{i}": i for i in range(20_000)}
    notes = Notes()
    chat(body, notes)  # comparing each name with all known ones would take minutes
    assert notes.ignored.endswith("19984 more")
    assert nearest("x" * 1_000_000, (KNOWN,)) is None


MESSAGE_KEYS: dict[str, Any] = {
    "id": "msg_1", "opts": {}, "reasoning_details": [{}], "provider_specific_fields": {}, "thinking_blocks": [],
    "cache_control": {"type": "ephemeral"}, "annotations": [], "refusal": None, "parsed": {}, "audio": None,
    "function_call": None, "prefix": False, "partial": False, "brand_new": None,
}  # fmt: skip


def test_unknown_keys_of_messages_parts_and_tools_are_ignored() -> None:
    notes = Notes()
    part = {"type": "text", "text": "a", "cache_control": {}, "annotations": [], "more": 1}
    messages = [
        USER | {"brand_new": 1},
        {"role": "assistant", "content": [part, {"type": "refusal", "refusal": "b"}], **MESSAGE_KEYS},
        USER,
    ]
    tool = {"function": {"strict": None, "parameters": {}, "name": "f", "returns": {}, "extra": 1}, "type": "function"}
    options = chat({"messages": messages, "tools": [tool | {"cache_control": {}}]}, notes)
    assert options["messages"] == [USER, {"role": "assistant", "content": "ab"}, USER]
    assert options["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert notes.ignored == "messages.brand_new, messages.content.more, tools.function.extra"


def test_a_message_that_was_begun_is_continued() -> None:
    for key in ("prefix", "partial"):
        begun = {"role": "assistant", "content": "Once", key: True}
        assert chat({"messages": [USER, begun]})["continue_final_message"] is True
        assert "continue_final_message" not in chat({"messages": [USER, begun, USER]})
    options = chat({"response_prefix": "Once", "add_generation_prompt": True})
    assert options["messages"][-1] == {"role": "assistant", "content": "Once"}
    assert options["continue_final_message"] is True
    assert "add_generation_prompt" not in options


def test_tools_of_other_types_are_left_out_and_said() -> None:
    notes = Notes()
    tools = [TOOL, {"type": "web_search"}, {"type": "custom", "custom": {"name": "c"}}, {"type": "an odd type"}]
    wanted = read_chat(CHAT | {"tools": tools}, notes)
    assert [tool.name for tool in wanted.tools] == ["f"]
    assert notes.changed == "tools: web_search, tools: custom, tools: other"
    assert "tools" not in chat({"tools": tools[1:]})
    for choice in ("required", {"type": "function", "function": {"name": "c"}}, {"type": "custom", "custom": {}}):
        with pytest.raises(ApiError, match="tool_choice"):
            chat({"tools": tools[1:], "tool_choice": choice})


def test_a_picture_in_the_result_of_a_tool_becomes_a_text_and_a_users_is_refused() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "read: "}, picture]}
    notes = Notes()
    options = chat({"messages": [USER, {"role": "assistant", "tool_calls": [call]}, result]}, notes)
    assert options["messages"][-1]["content"] == "read: [image omitted: this model reads text only]"
    assert notes.changed == "images: 1"
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\] is of type 'image_url'"):
        chat({"messages": [{"role": "user", "content": [picture]}]})


def test_errors_of_the_worker_name_the_option_as_the_sender_does(port: int) -> None:
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "m", "prompt": "x"})):
        status, _, answer = ask(port, path, base | {"repeat_penalty": 99})
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "repeat_penalty")
        assert error["message"].startswith("repeat_penalty is 99")
