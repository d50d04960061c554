"""Make the table of error codes from ``protocol.errors``."""

from protocol.attribute_docs import attribute_docs
from protocol.errors import RETRYABLE, ErrorCode
from tools.docs.markdown import GENERATED, table, text


def error_table() -> str:
    """Return the table. Each code's text has two paragraphs: what happened, and what to do."""
    docs = attribute_docs(ErrorCode)
    rows = []
    for code in ErrorCode:
        happened, remedy = docs[code.name].split("\n\n")
        name = f'<span id="{code.wire_name}"></span>`{code.wire_name}`'
        rows.append((str(code.value), name, text(happened), "yes" if code in RETRYABLE else "no", text(remedy)))
    header = ("code", "name", "what happened", "retryable", "what to do")
    return GENERATED.format(source="protocol/errors.py") + "\n\n" + table(header, rows) + "\n"
