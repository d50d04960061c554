"""The fields of a conversation: messages, tools and variables for the model's own chat template."""

from typing import Annotated, Any

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError, RequestError
from protocol.messages import ON_BEHALF_OF
from protocol.sampling_params import request_error
from protocol.values import CheckedValues, FieldsDisagree, Length, ReadWith, Then, Unfit, hints_of, read

MOST_TOOLS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
DEEPEST = 64
"""Most levels of maps and lists within one another."""
RESERVED = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "unk_token",
        "pad_token", "self",
    }
)  # fmt: skip
"""Variables of a template that a client may not set."""


def _map(given: Any) -> dict[str, Any]:
    """Return the given map. Raises ValueError if it is no map, if a key is no string, or if it is nested too deeply."""
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError("must be a map with strings as keys")
    depth = 0
    level: list[Any] = [given]
    while level:  # a value that is nested too deeply could not be packed again
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"must not be nested deeper than {DEEPEST}")
        inner = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in inner if isinstance(value, dict | list | tuple)]
    return given


def check_variables(given: Any) -> dict[str, Any] | None:
    """Return the variables of a template. Raises ValueError for a map that no template could take."""
    if given is None:
        return None
    variables = _map(given)
    for name in variables:
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            raise ValueError("must not set variables that are the template's own, or that no template can name")
    return variables


def _maps(given: Any) -> tuple[dict[str, Any], ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise ValueError("must be an array of maps")
    if len(given) > MOST_TOOLS:
        raise ValueError(f"must be at most {MOST_TOOLS} long")
    return tuple(map(_map, given))


def _role(role: str) -> str:
    if role not in ROLES:
        raise ValueError("must be system, user, assistant or tool")
    return role


Maps = Annotated[tuple[dict[str, Any], ...] | None, Length(most=MOST_TOOLS), ReadWith(_maps)]


class ChatMessage(CheckedValues):
    """One turn of a conversation. The template gets only the fields that the client sent."""

    role: Annotated[str, Then(_role)]
    """The speaker. ``developer`` means ``system``."""
    content: str | None = None
    """The text. Optional in an assistant's turn with tool_calls only."""
    name: Annotated[str, Length(most=256)] | None = None
    """The name of the speaker, for the template."""
    tool_calls: Maps = None
    """In an assistant's turn: usually {id, type, function: {name, arguments}}. The arguments are a map, or its
    JSON text."""
    tool_call_id: Annotated[str, Length(most=256)] | None = None
    """In a tool's turn: the id of the call that the turn answers, for the template."""
    reasoning_content: str | None = None
    """In an assistant's turn: its reasoning, for the template, which may leave it out."""

    def check(self) -> None:
        """Raise ValueError for a turn that says nothing, and for values that only an assistant has."""
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, not a {self.role}'s")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError(f"reasoning_content is an assistant's, not a {self.role}'s")
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be a string (except in an assistant's turn with tool_calls)")


class ChatFields(CheckedValues):
    """The fields of GENERATE and of tokenize that are for the chat template."""

    messages: Annotated[tuple[ChatMessage, ...], Length(1)] | None = None
    """A conversation, rendered with the model's own chat template. A special token written in a message's text becomes
    that token, as in a prompt."""
    tools: Maps = None
    """Functions that the assistant may call. The template gets these maps as they are, usually {type, function: {name,
    description, parameters}}."""
    template_kwargs: Annotated[dict[str, Any] | None, ReadWith(check_variables)] = None
    """Further variables of the template, such as {enable_thinking: false}."""
    add_generation_prompt: bool | None = None
    """End the text where the assistant speaks next. Unset: true, unless continue_final_message is true."""
    continue_final_message: bool = False
    """Continue the last message, instead of beginning a new turn."""

    def check(self) -> None:
        """Raise FieldsDisagree for fields that need a conversation, and for two that contradict each other."""
        if self.messages is None:
            for name in ("tools", "template_kwargs", "add_generation_prompt", "continue_final_message"):
                if getattr(self, name) not in (None, False):
                    raise FieldsDisagree(name, "is for the chat template: it needs messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldsDisagree("continue_final_message", "cannot be given together with add_generation_prompt")

    def for_template(self) -> dict[str, Any]:
        """Return the arguments of the template. Needs ``messages``. They have only the fields that the client sent."""
        ends = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "messages": [dict(vars(message)) for message in self.messages or ()],
            "tools": None if self.tools is None else list(self.tools),
            "variables": self.template_kwargs or {},
            "add_generation_prompt": ends,
            "continue_final_message": self.continue_final_message,
        }


# The questions that a worker answers, and the validation of their bodies.
#
# Only the supervisor uses the keys ``model`` and ``on_behalf_of``. It passes the bodies on as they came.
#
# tokenize       {prompt | messages, tools?, ...}  ->  {token_ids: bin, u32 little endian, count, text?, pieces?}
# detokenize     {token_ids: bin}                  ->  {text}
# chat_template  {}                                ->  {source, tool_source, special_tokens}


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


class Detokenize(CheckedValues):
    """Ask for the text of token ids."""

    token_ids: bytes

    def check(self) -> None:
        """Raise FieldsDisagree for half an id."""
        if len(self.token_ids) % 4:
            raise FieldsDisagree("token_ids", f"has {len(self.token_ids)} bytes: must be ids of 4 bytes each")


class AskTemplate(CheckedValues):
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
