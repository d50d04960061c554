"""Answer ASK messages: questions of clients about the model's tokenizer."""

from struct import pack
from typing import Any

from model_worker.engine import Engine
from model_worker.intake import Intake
from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import MAX_FRAME
from protocol.messages import Kind
from protocol.process.masking import masked_values
from protocol.questions import AskTemplate, Detokenize, Question, Tokenize

_MOST = MAX_FRAME[Kind.ANSWER] - 1024


def answer(question: Question, engine: Engine, intake: Intake, rendered: str | None = None) -> bytes:
    """Return the body of ANSWER. If the question cannot be answered, the body holds the error.

    rendered  the text that the chat template made of ``question.messages``
    """
    try:
        if isinstance(question, AskTemplate):
            return _fitting(pack_body({"result": _template(engine)}))
        if isinstance(question, Detokenize):
            return _fitting(pack_body({"result": {"text": _text(question, engine)}}))
        return _fitting(pack_body({"result": _tokens(question, engine, intake, rendered)}))
    except WireError as e:
        return failed(e)


def failed(error: WireError) -> bytes:
    """Return the body of ANSWER to a question that failed."""
    return pack_body({"error": masked_values(error.to_wire())})


def _tokens(question: Tokenize, engine: Engine, intake: Intake, rendered: str | None) -> dict[str, Any]:
    if question.prompt is None:
        ids = engine.encode_rendered(rendered or "")
    else:
        ids = intake.encode(question.prompt, add_special=question.add_special)
    result: dict[str, Any] = {"token_ids": pack(f"<{len(ids)}I", *ids), "count": len(ids)}
    result["context"] = engine.capabilities.context
    if question.with_text:
        result["text"] = question.prompt if rendered is None else rendered
    if question.with_pieces:
        result["pieces"] = [engine.token_bytes(token) for token in ids]
    return result


def _template(engine: Engine) -> dict[str, Any]:
    template = engine.chat_template
    if template is None:
        return {"source": None, "tool_source": None, "special_tokens": {}}
    named = dict(template.special_tokens)
    return {"source": template.source, "tool_source": template.tool_source, "special_tokens": named}


def _text(question: Detokenize, engine: Engine) -> str:
    ids, context = memoryview(question.token_ids).cast("I"), engine.capabilities.context
    if len(ids) > context:
        raise RequestError(
            f"token_ids has {len(ids)} tokens: at most {context} fit the context",
            field="token_ids",
            code=ErrorCode.CONTEXT_OVERFLOW,
        )
    return engine.decode(list(ids))


def _fitting(body: bytes) -> bytes:
    if len(body) > _MOST:
        raise WireError(ErrorCode.TOO_LARGE, f"the answer has {len(body)} bytes: at most {_MOST} can be sent")
    return body
