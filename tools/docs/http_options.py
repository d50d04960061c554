"""Make the tables of endpoints and of options in docs/http-api.md from the gateway's OpenAPI document."""

import re
from collections.abc import Callable
from typing import Any, Final

from gateway.openai.option_schemas import BOTH, CHAT, COMPLETION
from gateway.openai.schema import MESSAGES, RESPONSES, document
from tools.docs.markdown import GENERATED, table

SECTIONS: Final = {
    "/v1/responses": "the-responses-api",
    "/v1/messages": "anthropics-api",
    "/v1/models": "models",
    "/v1/requests": "requests",
    "/v1/events": "events-and-logs",
    "/v1/logs": "events-and-logs",
    "/v1/keys": "keys",
    "/v1/keys/{name}": "keys",
    "/v1/config": "configuration",
    "/livez": "probes",
}
"""The endpoints about which the page says more, and the part of the page."""
SAME_AS_OPTIONS: Final = {"add_generation_prompt", "continue_final_message", "parallel_tool_calls", "cut_to_context"}
"""Options with the meaning that they have in the table of request options, on the same page."""
USUAL: Final = {
    "instructions", "metadata", "model", "parallel_tool_calls", "stop_sequences", "stream", "system", "temperature",
    "top_k",
}  # fmt: skip
"""Options with the meaning that they have in the original API, or in the table of request options."""
SCHEMA: Final = "gateway/openai/schema.py"
RIGHT: Final = re.compile(
    r"For keys( for all models)? with the right ((?:`\w+`(?: or )?)+)\. ?(Off with `auth: none`\. ?)?"
)
"""The sentences about rights in the description of an endpoint. The page says in short what they say."""
ORDERS: Final = "Orders"
"""The tag of the endpoints that stand in a table of their own."""


def http_endpoints() -> str:
    """Return the table of endpoints, without the orders. Paths that mean the same stand in one row."""
    return _endpoints(lambda tag: tag != ORDERS)


def http_orders() -> str:
    """Return the table of the endpoints that take orders."""
    return _endpoints(lambda tag: tag == ORDERS)


def _endpoints(wanted: Callable[[str], bool]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for path, methods in document()["paths"].items():
        for method, described in methods.items():
            if not wanted(described["tags"][0]):
                continue
            shown = f"`{method.upper()} {path}`"
            query = [each["name"] for each in described.get("parameters", ()) if each["in"] == "query"]
            names = ", ".join(f"`{name}`" for name in query)
            right = _right(RIGHT.search(described["description"]))
            about = RIGHT.sub("", described["description"]).strip()
            what = f"{described['summary']} {about}".strip() + (f" Parameters: {names}." if names else "") + right
            place = f"[{shown}](#{SECTIONS[path]})" if path in SECTIONS else shown
            answer = described["responses"]["200"]["description"]
            rows.setdefault((what, answer), []).append(place)
    shown_rows = [(", ".join(places), *row) for row, places in rows.items()]
    if len({answer for _, answer in rows}) == 1:
        return _part(table(("endpoint", "what it does"), [row[:2] for row in shown_rows]), SCHEMA)
    return _part(table(("endpoint", "what it does", "the answer"), shown_rows), SCHEMA)


def _right(found: re.Match[str] | None) -> str:
    """Return the rights in short. \\* is for keys for all models, † for an endpoint that ``auth: none`` closes."""
    if found is None:
        return ""
    marks = (" \\*" if found[1] else "") + (" †" if found[3] else "")
    return f" Right: {found[2]}{marks}."


def http_options() -> str:
    """Return the table of the options of chats and completions that have another form than on the wire."""
    of = {"chats": CHAT, "completions": COMPLETION, "both": BOTH}
    rows = [
        (f"`{name}`", where, schema["description"])
        for where, group in of.items()
        for name, schema in group.items()
        if name not in SAME_AS_OPTIONS | USUAL
    ]
    return _part(table(("option", "of", "meaning"), rows), "gateway/openai/option_schemas.py")


def responses_options() -> str:
    """Return the table of the options of the Responses API."""
    return _options(RESPONSES, SCHEMA)


def anthropic_options() -> str:
    """Return the table of the options of Anthropic's API."""
    return _options(MESSAGES, SCHEMA)


def _options(options: dict[str, Any], source: str) -> str:
    rows = [(f"`{name}`", schema["description"]) for name, schema in options.items() if name not in USUAL]
    return _part(table(("option", "meaning"), rows), source)


def _part(text: str, source: str) -> str:
    return f"{GENERATED.format(source=source)}\n\n{text}\n"
