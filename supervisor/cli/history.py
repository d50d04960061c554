"""The turns of a conversation that ``run`` remembers and sends with the next question. Pure."""

from dataclasses import dataclass

Message = dict[str, str]

ROOM_SHARE = 8
"""Without --max-tokens, the context divided by this number is kept free for the next answer."""
KEPT_SHARE = 0.75
"""When turns are dropped, the remaining turns take at most this share of the allowed tokens. If only the excess were
dropped, each later prompt would begin differently from the prompt before. Then the worker could not use its cache, and
would compute the whole prompt again each time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer, which may have been interrupted."""

    question: str
    answer: str

    @property
    def size(self) -> int:
        """The size of the turn in bytes, from which its share of the tokens is estimated."""
        return len(self.question.encode(errors="surrogatepass")) + len(self.answer.encode(errors="surrogatepass"))


class History:
    """The turns that are sent with the next question.

    system      the system message, which always stays
    context     tokens of the model's context; None if that is not known
    max_tokens  most tokens of an answer; None for as many as fit into the context
    """

    def __init__(self, system: str | None = None, context: int | None = None, max_tokens: int | None = None) -> None:
        self._system = system
        self._most = None
        if context is not None:
            self._most = context - (context // ROOM_SHARE if max_tokens is None else max_tokens)
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def messages(self, question: str, left_out: int = 0) -> list[Message]:
        """Return the conversation with a new question, for the chat template.

        left_out  how many of the oldest turns to leave out
        """
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn in self._turns[left_out:]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self._turns.append(Turn(question, answer))

    def undo(self) -> bool:
        """Forget the newest turn. Returns False if there is none."""
        if not self._turns:
            return False
        self._turns.pop()
        return True

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def drop_oldest(self, count: int) -> None:
        """Forget the ``count`` oldest turns."""
        del self._turns[:count]

    def make_room(self, tokens: int) -> bool:
        """Forget the oldest turns if too little of the context is left for another answer.

        tokens  tokens of the conversation now, as the worker counted them. Each turn's share is estimated by its bytes;
                the worker's next count corrects the estimate

        Returns whether turns were forgotten.
        """
        if self._most is None or tokens <= self._most:
            return False
        fixed = len((self._system or "").encode(errors="surrogatepass"))
        each = tokens / max(1, fixed + sum(turn.size for turn in self._turns))
        before = len(self._turns)
        while self._turns and each * (fixed + sum(turn.size for turn in self._turns)) > KEPT_SHARE * self._most:
            self._turns.pop(0)
        return len(self._turns) < before
