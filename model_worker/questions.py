"""Answer ASK messages: questions of clients about the model's tokenizer."""

from struct import pack

from model_worker.engine import Engine
from model_worker.intake import Intake
from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import MAX_FRAME
from protocol.messages import Kind
from protocol.questions import Detokenize, Tokenize

_MOST = MAX_FRAME[Kind.ANSWER] - 1024


def answer(question: Tokenize | Detokenize, engine: Engine, intake: Intake, rendered: str | None = None) -> bytes:
    """Return the body of ANSWER. If the question cannot be answered, the body holds the error.

    rendered  the text that the chat template made of ``question.messages``
    """
    try:
        if isinstance(question, Detokenize):
            return _fitting(pack_body({"result": {"text": _text(question, engine)}}))
        ids = intake.encode(question.prompt) if question.prompt is not None else engine.encode_rendered(rendered or "")
        return _fitting(pack_body({"result": {"token_ids": pack(f"<{len(ids)}I", *ids), "count": len(ids)}}))
    except WireError as e:
        return failed(e)


def failed(error: WireError) -> bytes:
    """Return the body of ANSWER to a question that failed."""
    return pack_body({"error": error.to_wire()})


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
