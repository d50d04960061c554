"""The questions that a worker answers, and the validation of their bodies.

Only the supervisor uses the keys ``model`` and ``on_behalf_of``. It passes the bodies on as they came.

tokenize       {prompt | messages, tools?, ...}  ->  {token_ids: bin, u32 little endian, count, text?, pieces?}
detokenize     {token_ids: bin}                  ->  {text}
chat_template  {}                                ->  {source, tool_source, special_tokens}
"""

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from protocol.chat import ChatFields, ChatMessage
from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError, RequestError
from protocol.field_errors import request_error
from protocol.messages import ON_BEHALF_OF
from protocol.sampling_params import FieldsDisagree


class Tokenize(ChatFields):
    """Ask for the tokens of a prompt, or of a conversation as the model's own chat template renders it."""

    prompt: str | None = None
    add_special: bool = True
    """Begin the ids of a prompt with BOS where the model expects one. A chat template writes BOS itself."""
    with_text: bool = False
    """Return the text of the conversation, too, as the chat template renders it."""
    with_pieces: bool = False
    """Return the bytes of each token, too."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class Detokenize(BaseModel):
    """Ask for the text of token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    token_ids: bytes

    @model_validator(mode="after")
    def _whole_ids(self) -> "Detokenize":
        if len(self.token_ids) % 4:
            raise FieldsDisagree("token_ids", f"has {len(self.token_ids)} bytes: must be ids of 4 bytes each")
        return self


class AskTemplate(BaseModel):
    """Ask for the model's chat template, and for the texts of its special tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Question = Tokenize | Detokenize | AskTemplate
QUESTIONS: dict[str, type[Question]] = {
    "tokenize": Tokenize,
    "detokenize": Detokenize,
    "chat_template": AskTemplate,
}


def parse_question(verb: str, body: bytes) -> Question:
    """Return the validated question in the body of an ASK.

    Raises RequestError, which names the field. Its code is UNSUPPORTED if the verb is unknown here.
    """
    model = QUESTIONS.get(verb)
    if model is None:
        raise RequestError(f"a worker answers {', '.join(QUESTIONS)} only", field="verb", code=ErrorCode.UNSUPPORTED)
    try:
        fields = unpack_body(body)
        for name in ("model", ON_BEHALF_OF):
            fields.pop(name, None)
        return model.model_validate(fields)
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        raise request_error(error, model, ChatMessage, model.model_fields, {}) from None
