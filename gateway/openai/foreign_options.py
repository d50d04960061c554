"""Options of other servers and clients: what they mean here, which of them are refused, and which are ignored. Pure.

An option of a request that is none of this project's is settled in this order:

1. A synonym is translated (``translate``).
2. A name in ``NOT_OFFERED`` is refused, if its value asks for something.
3. A name in ``NO_EFFECT`` is ignored.
4. A name that looks like a known one with a typing error is refused, with the suggestion.
5. Any other name is ignored, and the answer says so.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import orjson

from gateway.http.answers import MOST_NAMED, Notes
from gateway.http.errors import ApiError, checked, invalid, unsupported
from protocol.presets import ALIASES

SYNONYMS: Final[Mapping[str, str]] = ALIASES | {
    "stopping_strings": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "repetition_penalty_range": "penalty_range",
    "repeat_last_n": "penalty_range",
    "sampler_seed": "seed",
    "random_seed": "seed",
    "tfs_z": "tfs",
    "mirostat": "mirostat_mode",
    "allowed_token_ids": "allowed_tokens",
    "custom_token_bans": "banned_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "regex_pattern": "regex",
    "guided_choice": "choice",
    "n_cmpl": "n",
    "num_return_sequences": "n",
    "template_vars": "chat_template_kwargs",
    "template_kwargs": "chat_template_kwargs",
    "reasoning_budget_tokens": "reasoning_budget",
    "thinking_budget": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
    "think": "enable_thinking",
}
"""Other names of options, {their name: ours}. Two names of one option must have equal values."""
ABOUT_THE_ACCOUNT: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
    }
)  # fmt: skip
"""Options that say nothing about the answer. They are accepted and not used."""
NO_EFFECT_OF: Final[Mapping[str, frozenset[str]]] = {
    "OpenAI about the account": ABOUT_THE_ACCOUNT,
    # ids, caches, where and how the request is computed
    "vLLM, SGLang or LMDeploy": frozenset(
        {
            "request_id", "rid", "session_id", "cache_salt", "extra_key", "kv_transfer_params", "with_cache",
            "preserve_cache", "spaces_between_special_tokens", "mm_processor_kwargs", "guided_decoding_backend",
            "guided_whitespace_pattern", "structured_outputs_backend", "separate_reasoning", "stream_reasoning",
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "client_metadata", "prediction", "nvext",
        }
    ),
    "llama-server": frozenset(
        {
            "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "timings_per_token", "return_progress",
            "verbose", "sse_ping_interval", "reasoning_format", "parse_tool_calls", "chat_format", "n_indent",
            "post_sampling_probs", "reasoning_in_content", "generation_prompt", "preserved_tokens", "grammar_lazy",
            "grammar_triggers", "backend_sampling", "t_max_prompt_ms", "num_ctx", "speculative_ngram",
            "num_speculative_tokens",
        }
    ),
    # The context of a model is what its operator has set.
    "TabbyAPI, KoboldAI or front ends for role-play": frozenset(
        {
            "truncation_length", "max_context_length", "generate_window", "trim_stop", "genkey", "quiet", "api_type",
            "api_server", "use_default_badwordsids", "singleline", "disable_input_formatting", "use_story",
            "use_memory", "use_authors_note", "use_world_info", "frmttriminc", "frmtrmblln", "frmtrmspch", "frmtadsnsp",
            "minimum_message_content_tokens", "adaptive_decay", "char_name", "user_name", "group_names",
        }
    ),
    "OpenRouter or LiteLLM": frozenset(
        {
            "usage", "provider", "plugins", "transforms", "trace", "session", "litellm_session_id", "litellm_trace_id",
            "litellm_metadata", "drop_params", "stream_timeout", "timeout", "num_retries", "caching",
        }
    ),
}  # fmt: skip
"""Options of other servers that change nothing about the answer of this one, by the servers that have them."""
NO_EFFECT: Final = frozenset[str]().union(*NO_EFFECT_OF.values())
IGNORED: Final = frozenset(
    {"models", "route", "samplers", "sampler_order", "sampler_priority", "include_reasoning", "memory", "top_n"}
)
"""Options of other servers that are ignored, which the answer says. Front ends send them always, and some of their
names differ by one letter from names of this project."""
NOT_OFFERED: Final[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "audio": ("these models write text", ()),
    "modalities": ("only text is offered", (["text"],)),
    "functions": ("use tools instead", ()),
    "function_call": ("use tool_choice instead", ("none", "auto")),
    "web_search_options": ("these models search no web: leave it out", ()),
    "moderation": ("leave it out", ()),
    "suffix": ("text is written behind the prompt only", ()),
    "best_of": ("give n instead, or the same number as n", (1,)),
    "echo": ("a chat sends no prompt back: /v1/completions does", (False,)),
    "prompt_logprobs": ("/v1/completions and /v1/chat/completions have it", ()),
    "use_beam_search": ("answers are drawn token by token", (False,)),
    "num_beams": ("answers are drawn token by token", (0, 1)),
    "length_penalty": ("it is for beam search", (0, 1)),
    "early_stopping": ("it is for beam search", (False,)),
    "num_beam_groups": ("it is for beam search", (0, 1)),
    "include_stop_str_in_output": ("the stop string is never part of the answer", (False,)),
    "no_stop_trim": ("the stop string is never part of the answer", (False,)),
    "skip_special_tokens": ("special tokens are no part of the answer's text", (True,)),
    "render_special": ("special tokens are no part of the answer's text", (False,)),
    "detokenize": ("every answer is a text", (True,)),
    "return_token_ids": ("answers have text, and POST /tokenize has its tokens", (False,)),
    "return_tokens": ("answers have text, and POST /tokenize has its tokens", (False,)),
    "return_tokens_as_token_ids": ("log-probabilities name tokens by their text", (False,)),
    "return_hidden_states": ("hidden states are never sent", (False,)),
    "truncate_prompt_tokens": ("a prompt is never cut: send a shorter one", (-1,)),
    "add_special_tokens": ("a prompt of token_ids is taken as it is", (True,)),
    "add_bos_token": ("a prompt of token_ids is taken as it is", (True,)),
    "bad_words": ("use banned_strings", ()),
    "stop_regex": ("use stop, which has strings", ()),
    "n_probs": ("use logprobs and top_logprobs", (0,)),
    "documents": ("put them into a message", ()),
    "chat_template": ("the model has a template of its own: chat_template_kwargs sets its variables", ()),
    "prompt_template": ("the model has a template of its own: chat_template_kwargs sets its variables", ()),
    "guided_grammar": ("use json_schema, regex or choice", ()),
    "grammar": ("use json_schema, regex or choice", ()),
    "grammar_string": ("use json_schema, regex or choice", ()),
    "ebnf": ("use json_schema, regex or choice", ()),
    "structural_tag": ("use tools, or json_schema", ()),
    "repetition_detection": ("use stop_on_loop", ()),
    "logits_processors": ("no code of a request runs here", ()),
    "custom_logit_processor": ("no code of a request runs here", ()),
    "lora": ("load the adapter with the model: lora in models.yaml", ()),
    "lora_path": ("load the adapter with the model: lora in models.yaml", ()),
    "adapter_name": ("load the adapter with the model: lora in models.yaml", ()),
    "images": ("these models read text", ()),
    "input_ids": ("/v1/completions has token_ids", ()),
    "input_embeds": ("send a text", ()),
    "prompt_embeds": ("send a text", ()),
    "t_max_predict_ms": ("use deadline_ms", (0, -1)),
    "response_fields": ("answers have all their fields", ()),
    "dynatemp_range": ("use min_temp and max_temp", (0,)),
    "top_n_sigma": ("use min_p", (0, -1)),
    "nsigma": ("use min_p", (0, -1)),
    "epsilon_cutoff": ("use min_p", (0,)),
    "eta_cutoff": ("use min_p or top_a", (0,)),
    "min_keep": ("leave it out", (0, 1)),
    "penalty_alpha": ("leave it out: there is no contrastive search", (0,)),
    "encoder_repetition_penalty": ("use repetition_penalty", (0, 1)),
    "no_repeat_ngram_size": ("use dry_multiplier", (0,)),
    "rep_pen_slope": ("use repetition_decay", (0, 1)),
    "smoothing_curve": ("use smoothing_factor alone", (0, 1)),
    "adaptive_target": ("use mirostat_mode", (0, -1, -0.01)),
    "max_tokens_second": ("answers come as fast as they can", (0,)),
    "bypass_eos": ("use ignore_eos", (False,)),
}
"""Options that are known and not offered: {name: (the remedy, values that ask for nothing)}. An empty text, list or map
and null ask for nothing, too."""
TRANSLATED: Final = frozenset(
    {"structured_outputs", "do_sample", "dynamic_temperature", "thinking", "enable_thinking", "verbosity"}
)
"""Options of other servers that become several of ours, or one with another value."""
OFF: Final = ("none", "off", "false", "no", "disabled")
"""Words that switch reasoning off."""
LONGEST_TEXT: Final = 1 << 16
"""Characters of a list that is given as a text."""


def asks_nothing(name: str, value: Any) -> bool:
    """Return whether a value of an option in ``NOT_OFFERED`` is the one that this server has anyway."""
    if value is None or (isinstance(value, str | list | dict) and not value and name != "web_search_options"):
        return True
    return any(isinstance(value, bool) is isinstance(each, bool) and value == each for each in NOT_OFFERED[name][1])


def refuse(name: str, remedy: str | None = None) -> ApiError:
    """Return the error for an option that is known and not offered."""
    return unsupported(name, f"is not offered: {remedy or NOT_OFFERED[name][0]}")


def settle(name: str, value: Any, known: Collection[str], notes: Notes) -> None:
    """Settle an option that is neither this project's nor a synonym: rules 2 to 5. Raises ApiError if it is refused.

    known  all names of options that the endpoint takes
    """
    if value is None or (name in IGNORED and value in ("", [], {})):
        return
    if name in NOT_OFFERED:
        if not asks_nothing(name, value):
            raise refuse(name)
    elif name in IGNORED:
        notes.ignore(name)
    elif name not in NO_EFFECT:
        if notes.ignored_names < MOST_NAMED and (near := nearest(name, (known, SYNONYMS, NOT_OFFERED, NO_EFFECT))):
            raise ApiError(400, f"unknown option {name[:64]!r}: did you mean {near}?", param=name[:64])
        notes.ignore(name)


def nearest(name: str, known: Iterable[Iterable[str]]) -> str | None:
    """Return a known name that differs from a name by one edit, or by two if the name has more than eight letters.

    An edit adds, drops or replaces a letter, or exchanges two neighbours.
    """
    if not 3 <= len(name) <= 64:  # nearly every word is one edit away from n
        return None
    most = 2 if len(name) > 8 else 1
    for edits in range(1, most + 1):
        for names in known:
            for each in names:
                if abs(len(each) - len(name)) <= edits and _within(name, each, edits):
                    return each
    return None


def _within(a: str, b: str, edits: int) -> bool:
    """Return whether so many edits make one text of the other. At the first difference there are four edits to try."""
    at, end = 0, min(len(a), len(b))
    while at < end and a[at] == b[at]:
        at += 1
    a, b = a[at:], b[at:]
    if not a or not b:
        return len(a) + len(b) <= edits
    if not edits:
        return False
    if a[:2] == b[1::-1] and len(a) > 1 and len(b) > 1 and _within(a[2:], b[2:], edits - 1):
        return True
    return any(_within(x, y, edits - 1) for x, y in ((a[1:], b[1:]), (a[1:], b), (a, b[1:])))


def translate(body: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the options of a request under our names, without those that are null or ask for nothing.

    names  filled with the sender's names of options: {our name: the sender's}

    Raises ApiError for two names of one option with different values, and for a value that has no meaning here.
    """
    given: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        ours = SYNONYMS.get(name, name)
        value = _usual(ours, name, value)
        if value is None:
            continue
        if ours in given:
            other = names.get(ours, ours)
            if given[ours] != value or type(given[ours]) is not type(value):
                raise invalid(name, f"and {other} are the same option, and differ: give one of them")
            continue
        given[ours] = value
        if ours != name:
            names[ours] = name
    _dynamic_temperature(given)
    _greedy(given)
    _shape(given, names)
    return given


def _usual(ours: str, name: str, value: Any) -> Any:
    """Return the value of an option in the form that the worker takes. None for a value that asks for nothing."""
    if ours in ("max_tokens", "seed", "n") and value == -1 and type(value) is int:
        return None
    if ours == "stop":
        return [each for each in value if each != ""] if isinstance(value, list) else value if value != "" else None
    if ours in ("banned_tokens", "allowed_tokens") and isinstance(value, str):
        parts = [part.strip() for part in value[:LONGEST_TEXT].split(",") if part.strip()]
        if len(value) > LONGEST_TEXT or not all(part.isdecimal() and len(part) < 11 for part in parts):
            raise invalid(name, "must be token ids with commas between them, or an array of ids")
        return [int(part) for part in parts]
    if ours == "dry_sequence_breakers" and isinstance(value, str):
        return _listed(name, value)
    if ours == "banned_strings" and isinstance(value, str):
        return [value] if value else None
    if ours in ("repetition_penalty", "temperature", "top_p") and type(value) is int:
        return float(value)  # 1 and 1.0 are one value
    if name == "repetition_penalty_range" and value == 0:
        return -1  # text-generation-webui's word for all tokens
    if ours == "dry_range" and value == -1:
        return 0  # llama-server's word for all tokens
    if ours == "mirostat_mode" and value is False:
        return 0
    if ours in ("negative_prompt", "regex", "json_schema", "preset") and value == "":
        return None
    return None if ours in ("logit_bias", "choice") and value in ({}, []) else value


def _listed(name: str, text: str) -> Any:
    """Return the array in a text. Front ends write it as JSON, some without the brackets."""
    if not text.strip():
        return None
    try:
        found = orjson.loads(text if text.lstrip().startswith("[") else f"[{text}]") if len(text) <= LONGEST_TEXT else 0
    except orjson.JSONDecodeError:
        found = 0
    return checked(name, found, list, "an array of strings")


def _dynamic_temperature(given: dict[str, Any]) -> None:
    """Drop the bounds of a dynamic temperature that is switched off, and a range that repeats the bounds."""
    if given.pop("dynamic_temperature", None) is False:
        for name in ("min_temp", "max_temp", "temp_exponent", "dynatemp_range"):
            given.pop(name, None)
    low, high = given.get("min_temp"), given.get("max_temp")
    if type(low) in (int, float) and low == high:  # the same temperature for every token: nothing is dynamic
        del given["min_temp"], given["max_temp"]
    elif low is not None and high is not None:
        given.pop("dynatemp_range", None)


def _greedy(given: dict[str, Any]) -> None:
    """Turn other servers' words for greedy decoding into a temperature of 0."""
    if given.get("do_sample") is False or (type(given.get("top_p")) is float and given["top_p"] == 0):
        given["temperature"] = 0.0
        if given.get("top_p") == 0:
            del given["top_p"]
    if isinstance(given.get("do_sample"), bool):
        del given["do_sample"]


def _shape(given: dict[str, Any], names: dict[str, str]) -> None:
    """Turn vLLM's ``structured_outputs`` into the options that give an answer its shape."""
    shape = given.pop("structured_outputs", None)
    if shape is None or isinstance(shape, bool):
        return
    checked("structured_outputs", shape, dict, "an object with json, regex or choice")
    for key, value in shape.items():
        place = f"structured_outputs.{key[:64]}"
        if value is None or value is False:
            continue
        if key in ("json", "regex", "choice"):
            ours = "json_schema" if key == "json" else key
        elif key == "json_object":
            ours, value = "json_schema", {"type": "object"}
        elif key in ("grammar", "structural_tag"):
            raise unsupported(place, "is not offered: use json, regex or choice")
        else:  # how another server compiles the shape
            continue
        if ours in given and given[ours] != value:
            raise invalid(place, f"and {names.get(ours, ours)} differ: give one of them")
        given[ours], names[ours] = value, place


def read_thinking(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Take what a request says about reasoning out of its options. Return the variables of the chat template for it.

    ``reasoning_budget`` is left in ``given``. Templates know two names of the switch, and ignore variables that they do
    not know. Raises ApiError.
    """
    variables: dict[str, Any] = {}
    on: bool | None = None
    effort, said = given.pop("reasoning_effort", None), "reasoning_effort"
    switch = given.pop("enable_thinking", None)
    if isinstance(switch, bool):
        on, names["template_kwargs"] = switch, names.get("enable_thinking", "enable_thinking")
    elif isinstance(switch, str) and effort is None:  # Ollama's think: "high"
        effort, said = switch, names.get("enable_thinking", "enable_thinking")
    elif switch is not None:
        name = names.get("enable_thinking", "enable_thinking")
        raise invalid(name, "must be true, false, or a word such as low or high")
    thinking = given.pop("thinking", None)
    if isinstance(thinking, bool):
        on = thinking
    elif thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in ("enabled", "disabled", "adaptive", "auto"):
            raise invalid("thinking.type", "must be enabled, disabled, adaptive or auto")
        on = on if kind in ("adaptive", "auto") else kind == "enabled"
        if kind == "enabled" and thinking.get("budget_tokens") is not None:
            _budget(given, names, thinking["budget_tokens"], "thinking.budget_tokens")
    reasoning = given.pop("reasoning", None)
    if isinstance(reasoning, dict):
        if isinstance(reasoning.get("enabled"), bool):
            on = reasoning["enabled"]
        if reasoning.get("effort") is not None and effort is None:
            effort, said = reasoning["effort"], "reasoning.effort"
        if reasoning.get("max_tokens") is not None:
            _budget(given, names, reasoning["max_tokens"], "reasoning.max_tokens")
    elif reasoning is not None and not isinstance(reasoning, bool):
        raise invalid("reasoning", "must be an object with effort or max_tokens")
    elif reasoning is not None:
        on = reasoning
    if effort is not None:
        checked(said, effort, str, "a word such as low or high")
        variables["reasoning_effort"] = effort  # a variable that templates of reasoning models read
        names["template_kwargs"] = said
        if effort in OFF:
            on = False
    if on is not None:
        variables |= {"enable_thinking": on, "thinking": on}
        names.setdefault("template_kwargs", "thinking")
    if (verbosity := given.pop("verbosity", None)) is not None:
        if verbosity not in ("low", "medium", "high"):
            raise invalid("verbosity", "must be low, medium or high")
        variables["verbosity"] = verbosity  # templates that know it read it
    return variables


def _budget(given: dict[str, Any], names: dict[str, str], value: Any, place: str) -> None:
    if type(value) is not int or value < 0:
        raise invalid(place, "must be a whole number of at least 0")
    if "reasoning_budget" in given and given["reasoning_budget"] != value:
        other = names.get("reasoning_budget", "reasoning_budget")
        raise invalid(place, f"and {other} are the same option, and differ: give one of them")
    given["reasoning_budget"], names["reasoning_budget"] = value, place
