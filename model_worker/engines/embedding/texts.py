"""Make rows of token ids from texts, or from a query and documents. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from model_worker.embedding import EmbedJob
from model_worker.engine import LoadError
from model_worker.engines.embedding.directory import Recipe
from model_worker.engines.tokenizer import Tokenizer, guarded
from protocol.errors import ErrorCode, RequestError

# Qwen3-Reranker's own prompt, as its card has it. It stands in none of its files.
_HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_BYTES_PER_TOKEN: Final = 64
"""A text with more bytes for each token that the model takes is not tokenized: that would stop all requests."""


@dataclass(frozen=True, slots=True)
class Row:
    """The ids of one text, or of a query and a document.

    kinds   0 for the query and 1 for the document, where the tokenizer tells; else empty
    prompt  the tokens of the prompt at the beginning
    """

    ids: Sequence[int]
    kinds: Sequence[int] = ()
    prompt: int = 0


class TextReader:
    """Makes rows for one loaded model.

    vocab_size  rows of the model's embedding
    """

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe, vocab_size: int) -> None:
        self._library, self._recipe, self._vocab_size = tokenizer.library, recipe, vocab_size
        self._special = frozenset(i for i, t in self._library.get_added_tokens_decoder().items() if t.special)
        self._most = recipe.most_tokens
        self._prompts: dict[str, int] = {}
        self._head: Sequence[int] = ()
        self._tail: Sequence[int] = ()
        if recipe.form == "yes_no":
            self._head, self._tail = (
                self._library.encode(text, add_special_tokens=False).ids for text in (_HEAD, _TAIL)
            )
            self._most -= len(self._head) + len(self._tail)
        least = len(self._library.encode("").ids) if recipe.form != "yes_no" else 0
        if self._most <= least:
            needs = recipe.most_tokens - self._most + least + 1
            raise LoadError(
                f"texts may have {recipe.most_tokens} tokens, and {needs} are needed for a text of one: set more",
                key="max_seq_len",
            )

    def check(self, job: EmbedJob) -> None:
        """Raise RequestError for what a job asks in vain, besides its texts."""
        recipe, prompts = self._recipe, self._recipe.prompts or {}
        longest = recipe.most_tokens * _BYTES_PER_TOKEN
        for field, text in (("query", job.query), ("instruction", job.prompt if job.query is not None else None)):
            if text is not None and len(text) > longest:
                most = f"this model takes no more than {recipe.most_tokens} tokens: shorten it"
                message = f"{field} has {len(text)} characters: {most}"
                raise RequestError(message, field=field, code=ErrorCode.CONTEXT_OVERFLOW)
        if job.dimensions is not None and job.dimensions > recipe.size:
            message = f"dimensions is {job.dimensions}: this model's vectors have {recipe.size} numbers"
            raise RequestError(message, field="dimensions")
        if recipe.task == "embed" and job.prompt and job.prompt not in prompts:
            known = f"this model's prompts are {', '.join(sorted(prompts))}" if prompts else "this model has no prompts"
            message = f"prompt_name is {job.prompt[:64]!r}: {known}"
            raise RequestError(message, field="prompt_name")
        if recipe.form == "classifier" and job.prompt:
            raise RequestError("instruction: this model takes none: leave it out", field="instruction")

    def read(self, job: EmbedJob, first: int, count: int) -> list[Row]:
        """Return the rows of ``count`` texts of a job from ``first`` on. Raises RequestError, which names the text."""
        return [self._row(job, number) for number in range(first, min(first + count, len(job.texts)))]

    def _row(self, job: EmbedJob, number: int) -> Row:
        text, name = job.texts[number], "documents" if job.query is not None else "texts"
        if not isinstance(text, str):
            return self._given(job, text, number)
        whole = text if job.query is None else f"{job.query}{text}"
        if len(whole) > self._recipe.most_tokens * _BYTES_PER_TOKEN:
            if not job.truncate:
                size, most = len(whole), self._recipe.most_tokens
                raise _too_long(name, number, f"has {size} characters", f"no more than {most} tokens", job)
            text = text[: self._recipe.most_tokens * _BYTES_PER_TOKEN]
        query = job.query
        if self._recipe.lowers:
            text, query = text.lower(), query and query.lower()
        prompt = 0
        before = self._prompt(job) if query is None else ""
        if query is None:
            encoded = self._encode(number, name, before + text)
            prompt = self._length(before) if before and not self._recipe.keeps_prompt else 0
        elif self._recipe.form == "classifier":
            encoded = self._encode(number, name, query, text)
        else:
            return self._judged(job, number, query, text)
        ids, kinds = encoded.ids, encoded.type_ids
        if (excess := len(ids) - self._most) > 0:
            places = [i for i, part in enumerate(encoded.sequence_ids) if part == (0 if query is None else 1)]
            taken = self._own_tokens(before) if query is None else 0
            if excess >= len(places) - taken:  # nothing would be left of the text itself
                what, field = ("prompt", "prompt_name") if query is None else ("query", "query")
                raise RequestError(
                    f"the {what} and special tokens have {len(ids) - len(places) + taken} tokens: this model takes at "
                    f"most {self._most} with the text: shorten the {what}",
                    field=field,
                    code=ErrorCode.CONTEXT_OVERFLOW,
                )
            if not job.truncate:
                raise _too_long(name, number, f"has {len(ids)} tokens", f"at most {self._most}", job)
            cut = frozenset(places[-excess:])
            ids = [token for i, token in enumerate(ids) if i not in cut]
            kinds = [kind for i, kind in enumerate(kinds) if i not in cut]
        if not ids:
            raise RequestError(f"{name}[{number}] has no tokens: leave it out", field=name)
        return Row(ids, kinds if any(kinds) else (), prompt)

    def _judged(self, job: EmbedJob, number: int, query: str, text: str) -> Row:
        """Return the question to a language model, whether a document answers a query."""
        # The names of special tokens in a document stay text. Else a document could end the question and answer it.
        self._library.encode_special_tokens = True
        try:
            before = f"<Instruct>: {job.prompt or _INSTRUCTION}\n<Query>: {query}\n<Document>: "
            body = self._encode(number, "documents", before + text).ids
            if len(body) > self._most:
                if (needed := len(self._encode(number, "query", before).ids)) >= self._most:
                    raise RequestError(
                        f"query and instruction have {needed} tokens: this model takes at most {self._most} with the "
                        "document: shorten them",
                        field="query",
                        code=ErrorCode.CONTEXT_OVERFLOW,
                    )
                if not job.truncate:
                    raise _too_long("documents", number, f"has {len(body)} tokens", f"at most {self._most}", job)
        finally:
            self._library.encode_special_tokens = False
        return Row([*self._head, *body[: self._most], *self._tail])

    def _given(self, job: EmbedJob, ids: Sequence[int], number: int) -> Row:
        if not ids:
            raise RequestError(f"token_ids[{number}] has no tokens: leave it out", field="token_ids")
        if (most := max(ids)) >= self._vocab_size:
            raise RequestError(
                f"token_ids[{number}] has the id {most}, and this model's vocabulary has {self._vocab_size}: the ids "
                "are another model's; send text",
                field="token_ids",
            )
        if len(ids) > self._most and not job.truncate:
            raise _too_long("token_ids", number, f"has {len(ids)} tokens", f"at most {self._most}", job)
        return Row(ids[: self._most])

    def _prompt(self, job: EmbedJob) -> str:
        name = self._recipe.prompt if job.prompt is None else job.prompt
        text = (self._recipe.prompts or {}).get(name, "") if name else ""
        return text.lower() if self._recipe.lowers else text

    def _own_tokens(self, prompt: str) -> int:
        """Return the tokens of a prompt without any special token."""
        return len(self._library.encode(prompt, add_special_tokens=False).ids) if prompt else 0

    def _length(self, prompt: str) -> int:
        """Return the tokens of a prompt without a special token at its end, as sentence-transformers counts them."""
        if prompt not in self._prompts:
            ids = self._library.encode(prompt).ids
            self._prompts[prompt] = len(ids) - bool(ids and ids[-1] in self._special)
        return self._prompts[prompt]

    def _encode(self, number: int, name: str, text: str, second: str | None = None) -> Any:
        return guarded(lambda: self._library.encode(text, second), f"{name}[{number}]", name)


def _too_long(name: str, number: int, has: str, most: str, job: EmbedJob) -> RequestError:
    where = " with the query" if job.query is not None else ""
    return RequestError(
        f"{name}[{number}] {has}{where}: this model takes {most}: shorten it, or give truncate: true",
        field=name,
        code=ErrorCode.CONTEXT_OVERFLOW,
    )
