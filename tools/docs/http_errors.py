"""Make the table of errors over HTTP from ``gateway.http.errors``."""

from gateway.http.errors import STATUS, code_of, type_of
from protocol.errors import RETRYABLE, ErrorCode
from tools.docs.markdown import GENERATED, table

NEVER_ANSWERED = frozenset({ErrorCode.DUPLICATE_REQUEST})
"""An error that only a fault of the gateway itself could cause."""
WITH_A_TIME = frozenset({ErrorCode.MODEL_FAILED, ErrorCode.MODEL_NOT_RUNNING})
"""Errors that may have ``retry_after_ms``, although their codes alone are final."""


def http_error_table() -> str:
    """Return the table, by status. Errors that differ in their codes alone share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for code, status in sorted(STATUS.items(), key=lambda entry: (entry[1], entry[0])):
        if code not in NEVER_ANSWERED:
            again = "yes" if code in RETRYABLE else "if it has `Retry-After`" if code in WITH_A_TIME else "no"
            known = f"[`{code_of(code)}`](wire-protocol.md#{code.wire_name})"
            rows.setdefault((str(status), f"`{type_of(status)}`", again), []).append(known)
    header = ("status", "`type`", "sent again", "`code`")
    shown = table(header, [(*same, ", ".join(codes)) for same, codes in rows.items()])
    return GENERATED.format(source="gateway/http/errors.py") + "\n\n" + shown + "\n"
