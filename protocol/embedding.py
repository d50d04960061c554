"""The bodies of EMBED and RERANK, and their validation. The worker decides what is valid."""

from typing import Annotated, Any

from protocol.codec import unpack_body
from protocol.errors import FrameError, RequestError
from protocol.messages import Embed, Rerank
from protocol.request import ELSEWHERE
from protocol.sampling_params import request_error
from protocol.values import CheckedValues, FieldsDisagree, Length, Then, Unfit, Within, hints_of, read

__all__ = ["EmbedRequest", "RerankRequest", "parse_vectors"]


def _whole_ids(lists: tuple[bytes, ...] | None) -> tuple[bytes, ...] | None:
    if any(len(ids) % 4 for ids in lists or ()):
        raise ValueError("must be an array of bins of ids of 4 bytes (u32, little endian)")
    return lists


class EmbedRequest(CheckedValues):
    """The body of EMBED. It has exactly one of texts and token_ids."""

    texts: Annotated[tuple[str, ...] | None, Length(1)] = None
    """The texts."""
    token_ids: Annotated[tuple[bytes, ...] | None, Length(1), Then(_whole_ids)] = None
    """Texts as token ids: a bin for each, u32, little endian. They are used as they are, without special tokens and
    without a prompt."""
    prompt_name: str | None = None
    """The name of the model's prompt that stands before each text, such as `query`; empty: none. Unset: the model's own
    choice, which most models do not make."""
    dimensions: Annotated[int, Within(1, 1 << 20)] | None = None
    """Keep this many numbers of each vector, and give the vector the length 1 again. For models that were trained for
    it."""
    truncate: bool = False
    """Cut texts that are longer than the model takes. False: refuse such a request."""

    def check(self) -> None:
        """Raise FieldsDisagree or ValueError for values that do not go together."""
        if (self.texts is None) == (self.token_ids is None):
            raise ValueError("give exactly one of texts and token_ids")
        if self.prompt_name and self.token_ids is not None:
            raise FieldsDisagree("prompt_name", "cannot be given together with token_ids")


class RerankRequest(CheckedValues):
    """The body of RERANK."""

    query: str
    """What the documents are compared with."""
    documents: Annotated[tuple[str, ...], Length(1)]
    """The documents."""
    instruction: str | None = None
    """What the model is asked to look for, for models such as Qwen3-Reranker. Unset: the usual instruction."""
    truncate: bool = False
    """Cut documents that do not fit the model together with the query. False: refuse such a request."""


def parse_vectors(verb: str, body: bytes) -> EmbedRequest | RerankRequest:
    """Return the validated request in the body of an EMBED or a RERANK, whose ``verb`` is ``Generate.verb``.

    Raises RequestError, which names the field, its value and its limit.
    """
    kind: Any = {Embed.verb: EmbedRequest, Rerank.verb: RerankRequest}[verb]
    try:
        request: EmbedRequest | RerankRequest = read(kind, unpack_body(body))
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    except Unfit as e:
        raise request_error(e.flaws[0], [*hints_of(kind)], {}, ELSEWHERE) from None
    return request
