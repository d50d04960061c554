"""What clients ask a model beside generating: the bodies of ASK, validated. ``model`` is the supervisor's to read.

tokenize    {prompt | messages, tools?, ...}  ->  {token_ids: bin, u32 little endian, count}
detokenize  {token_ids: bin}                  ->  {text}
"""

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from protocol.chat import ChatFields, ChatMessage
from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError, RequestError
from protocol.field_errors import request_error
from protocol.sampling_params import FieldsDisagree


class Tokenize(ChatFields):
    """How a prompt, or a conversation with the model's own chat template, is cut into tokens."""

    prompt: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class Detokenize(BaseModel):
    """The text of token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    token_ids: bytes

    @model_validator(mode="after")
    def _whole_ids(self) -> "Detokenize":
        if len(self.token_ids) % 4:
            raise FieldsDisagree("token_ids", f"has {len(self.token_ids)} bytes: must be ids of 4 bytes each")
        return self


QUESTIONS: dict[str, type[Tokenize] | type[Detokenize]] = {"tokenize": Tokenize, "detokenize": Detokenize}


def parse_question(verb: str, body: bytes) -> Tokenize | Detokenize:
    """The validated question in the body of an ASK. Raises RequestError naming the field, and UNSUPPORTED for a verb
    that is unknown here."""
    model = QUESTIONS.get(verb)
    if model is None:
        raise RequestError(f"a worker answers {' and '.join(QUESTIONS)} only", field="verb", code=ErrorCode.UNSUPPORTED)
    try:
        fields = unpack_body(body)
        fields.pop("model", None)
        return model.model_validate(fields)
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        raise request_error(error, model, ChatMessage, model.model_fields, {}) from None
