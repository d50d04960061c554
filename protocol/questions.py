"""The questions that a worker answers, and the validation of their bodies.

Only the supervisor uses the keys ``model`` and ``on_behalf_of``. It passes the bodies on as they came.

tokenize       {prompt | messages, tools?, ...}  ->  {token_ids: bin, u32 little endian, count, text?, pieces?}
detokenize     {token_ids: bin}                  ->  {text}
chat_template  {}                                ->  {source, tool_source, special_tokens}
"""

from protocol.chat import ChatFields
from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError, RequestError
from protocol.field_errors import request_error
from protocol.messages import ON_BEHALF_OF
from protocol.values import FieldsDisagree, Record, Unfit, hints_of, read


class Tokenize(ChatFields):
    """Ask for the tokens of a prompt, or of a conversation as the model's own chat template renders it."""

    prompt: str | None = None
    add_special: bool = True
    """Begin the ids of a prompt with BOS where the model expects one. A chat template writes BOS itself."""
    with_text: bool = False
    """Return the text of the conversation, too, as the chat template renders it."""
    with_pieces: bool = False
    """Return the bytes of each token, too."""

    def check(self) -> None:
        """Raise ValueError unless there is one of prompt and messages."""
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")


class Detokenize(Record):
    """Ask for the text of token ids."""

    token_ids: bytes

    def check(self) -> None:
        """Raise FieldsDisagree for half an id."""
        if len(self.token_ids) % 4:
            raise FieldsDisagree("token_ids", f"has {len(self.token_ids)} bytes: must be ids of 4 bytes each")


class AskTemplate(Record):
    """Ask for the model's chat template, and for the texts of its special tokens."""


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
        return read(model, fields)
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    except Unfit as e:
        raise request_error(e.flaws[0], hints_of(model), {}) from None
