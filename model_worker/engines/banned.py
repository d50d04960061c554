"""Strings that an answer must not hold: which text may be delivered, which text waits, and where to draw again.

Pure Python. The engine pushes each drawn token with the text that the token completes. Text that may be the beginning
of a banned string is held, and so are its tokens, because delivered text cannot be taken back. When a banned string is
complete, the answer goes back to the token in which the string began. There, behind the same tokens, that token may not
be drawn again: ``blocked`` names it. Further hits at the same place add to ``blocked``.

How this works together with other options:

* The search is over the text as it would be delivered, without regard to case. A stop string cuts the text first: text
  behind the beginning of a stop string is not delivered and bans nothing.
* Tokens are delivered whole: a token is final, with its id, its log-probability and all of its text, or it is held.
* Going back can turn delivered text into the beginning of a banned string, because other tokens follow now. Then the
  first token behind the delivered ones is blocked. Text that could become part of a stop string that way is held.
* At an end token or at the limit of tokens, held text is delivered (``finish``), because it was no banned string. If it
  is one (because text held for a stop string is released), the answer goes back and has not ended.
* Tokens that were taken back count neither as completion tokens nor towards the limits. After a return, every place has
  another random number than before (engines/draws).
* The work is limited. The answer ends as it is, with the reason "banned_strings" (FinishReason.BANNED), in three cases:
  after MOST_IN_A_ROW returns without a delivered token between them; after more returns in all than the answer may have
  tokens, plus MOST_IN_A_ROW; and where no token is left to draw (``give_up``).
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from model_worker.text import Pieces, StopMatcher, TextStream
from protocol.messages import FinishReason

MOST_IN_A_ROW = 100
"""The most returns without a delivered token between them. Each return costs at most as many tokens as a banned string
has characters (256). A model that was led away from a hundred continuations will not find another one."""


@dataclass(frozen=True, slots=True)
class BanVerdict:
    """The consequences of the newest token for the answer.

    tokens   how many of the held tokens, from the oldest on, are final now
    text     the text of these tokens
    back_to  None, or how many drawn tokens of the answer are kept. All later tokens are void. The next token is drawn
             in their place, and is none of ``blocked``
    ended    None, or why the answer ends here: "stop" (a stop string; every token counts), or "banned_strings" (no
             continuation was found; held tokens beyond ``tokens`` are void)
    """

    tokens: int = 0
    text: str = ""
    back_to: int | None = None
    ended: str | None = None


class BannedStrings:
    """Judges the text of one answer. A token's position is the number of tokens that were drawn and kept before it.

    banned   strings that the text must not hold; empty ones are ignored
    stops    strings that end the answer
    minimum  number of first tokens in which no stop string is looked for
    limit    tokens that the answer may have
    healed   whether the first token heals the prompt (engines/healing). ``minimum`` and ``limit`` do not count it
    """

    def __init__(
        self, banned: Iterable[str], stops: Iterable[str] = (), *, minimum: int = 0, limit: int, healed: bool = False
    ) -> None:
        self._banned = tuple(fold(string) for string in banned if string)
        self._stops = tuple(stops)
        self._reach = max(map(len, self._banned), default=0) + max(map(len, self._stops), default=0)
        self._minimum = minimum + healed if minimum else 0
        self._healed = healed
        self._left = limit + MOST_IN_A_ROW
        self._in_a_row = 0
        self._final = 0  # number of delivered tokens
        self._start = 0  # number of delivered characters
        self._before = ""  # the last delivered characters: as many as a banned string may have begun with
        self._ids: list[int] = []  # the held tokens, and their texts
        self._texts: list[str] = []
        self._boundaries: deque[tuple[int, int]] = deque()
        """(tokens, characters) of the answer up to places where it can be cut: behind whole characters, and not inside
        of what may be a stop string."""
        self._blocked: dict[int, set[int]] = {}  # by position; valid only behind the tokens that are before it now
        # Numbers of characters of the answer: all; those that no stop string takes back; those in which no banned
        # string begins.
        self._end = self._passed = self._safe = 0
        self._resume()

    @property
    def position(self) -> int:
        """Return the position of the token that is drawn next."""
        return self._final + len(self._ids)

    @property
    def found(self) -> str | None:
        """Return the stop string that ended the answer; None if none has."""
        return self._stop.found

    @property
    def blocked(self) -> frozenset[int]:
        """Return the ids that must not be drawn next."""
        return frozenset(self._blocked.get(self.position, ()))

    def push(self, token_id: int, text: str) -> BanVerdict:
        """Judge a token and the text that it completes; "" while a character is incomplete."""
        looked_for = self.position >= self._minimum
        self._ids.append(token_id)
        self._texts.append(text)
        found = self._search(text, self.position, looked_for)
        if self._hit:
            return self._go_back()
        if found:
            return self._deliver(len(self._ids), self._passed - self._start, FinishReason.STOP)
        return self._release()

    def finish(self, text: str = "") -> BanVerdict:
        """End the answer behind the newest token, at an end token (which is not pushed) or at the limit of its length.

        text  the text that the detokenizer still held

        The verdict delivers everything. But if held text contained a banned string or a stop string, the verdict has
        ``back_to`` or ``ended``.
        """
        found = self._search(text, self.position, self.position > self._minimum)  # the text is that of drawn tokens
        if not found and not self._hit:
            self._pass_on(self._stop.flush())
        if self._hit:
            return self._go_back()
        self._texts.append(text)
        if found:
            return self._deliver(len(self._ids), self._passed - self._start, FinishReason.STOP)
        return self._deliver(len(self._ids), self._end - self._start)

    def give_up(self) -> BanVerdict:
        """End the answer with what it has, because no token is left that may be drawn next."""
        return self._deliver(len(self._ids), self._end - self._start, FinishReason.BANNED)

    def _resume(self) -> None:
        """Continue the search behind the kept tokens. A string may have begun in their last characters."""
        tail, looked_at, position = "", 0, self.position
        for text in reversed(self._texts):
            if len(tail) >= self._reach:
                break
            tail = text + tail
            position -= 1
            if position >= self._minimum:
                looked_at = len(tail)
        else:
            tail = self._before + tail
        self._stop, self._matcher = StopMatcher(self._stops), StopMatcher(self._banned)
        held = looked_at - len(self._stop.push(tail[len(tail) - looked_at :])[0])
        self._passed = self._end - held
        text = tail[: len(tail) - held][-self._reach :]
        self._safe = self._passed - len(text) + len(self._matcher.push(fold(text))[0])
        self._hit = False

    def _search(self, text: str, tokens: int, look_for_stops: bool) -> bool:
        """Return whether a stop string ends in the next text. Note ``_hit``, and where the answer can be cut."""
        self._end += len(text)
        passed, found = self._stop.push(text) if look_for_stops else (text, False)
        self._pass_on(passed)
        if text and self._passed == self._end:
            self._boundaries.append((tokens, self._end))
        return found

    def _pass_on(self, text: str) -> None:
        self._passed += len(text)
        safe, self._hit = self._matcher.push(fold(text))
        self._safe += len(safe)

    def _release(self) -> BanVerdict:
        """Deliver the text up to the last place where the answer can be cut and no banned string may have begun."""
        tokens, end = self._final, self._start
        while self._boundaries and self._boundaries[0][1] <= self._safe:
            tokens, end = self._boundaries.popleft()
        return self._deliver(tokens - self._final, end - self._start) if tokens > self._final else _NOTHING

    def _deliver(self, count: int, characters: int, ended: str | None = None) -> BanVerdict:
        text = "".join(self._texts if count == len(self._ids) else self._texts[:count])[:characters]
        del self._ids[:count], self._texts[:count]
        self._final += count
        self._start += len(text)
        self._before = (self._before + text)[-self._reach :] if self._reach else ""
        if count:
            self._in_a_row = 0
        for position in [p for p in self._blocked if p < self._final]:
            del self._blocked[position]
        return BanVerdict(count, text, None, ended)

    def _go_back(self) -> BanVerdict:
        """Block the token in which a banned string begins, at ``_safe``, and drop that token and all later ones.

        If the string begins in delivered text (which had another continuation before), block the first token behind
        that text.
        """
        number, end = 0, self._start
        while number < len(self._texts) and end + len(self._texts[number]) <= self._safe:
            end += len(self._texts[number])
            number += 1
        if end >= self._safe:  # the string's first character: tokens without text before it are parts of that character
            while number and not self._texts[number - 1] and not (self._healed and self._final + number == 1):
                number -= 1
        position = self._final + number
        self._in_a_row += 1
        self._left -= 1
        blocked = (
            self._ids[number] if number < len(self._ids) else None
        )  # None: the end of the text revealed a broken character
        del self._ids[number:], self._texts[number:]
        for later in [p for p in self._blocked if p > position]:
            del self._blocked[later]
        while self._boundaries and self._boundaries[-1][0] > position:
            self._boundaries.pop()
        self._end = end
        self._resume()
        if blocked is None or self._in_a_row > MOST_IN_A_ROW or self._left < 0:
            return self.give_up()
        self._blocked.setdefault(position, set()).add(blocked)
        return BanVerdict(back_to=position)


_NOTHING = BanVerdict()


def fold(text: str) -> str:
    """Return a text for comparison without regard to case, changed character by character, so that its length stays.

    "ß" has no single capital character and does not change.
    """
    folded = text.casefold()
    if len(folded) == len(text):  # no character becomes none, so each has become one
        return folded
    return "".join(f if len(f := c.casefold()) == 1 else low if len(low := c.lower()) == 1 else c for c in text)


# Token healing: draw the prompt's last token again, among all tokens that begin with its text. Pure Python.
#
# A prompt that ends inside a word is divided into tokens as no text of the training was. For example "https:" is a
# token, but the model learnt continuations of "https://". So the last token is dropped. The first draw is limited to
# the tokens whose text begins with the text of the dropped token, which is itself one of them.
#
# * The drawn token is called the healed token. It takes the place of the dropped token in the prompt. It is no
# completion
#   token, its id and log-probability are not delivered, and it does not count towards the limits. Prompt tokens are
#   counted as the client sent them. The part of the healed token's text that goes beyond the dropped one's text is the
#   beginning of the answer. It is delivered without an id.
# * In all other respects it is an ordinary draw: temperature, bias and banned strings apply, and it takes one random
#   number. It never ends the answer, because end tokens have no text.
# * Three kinds of prompts are not changed:
#       a prompt of one token, because nothing would be left to draw from
#       a prompt that ends with a special token, because that token has no text
#       a prompt that ends with a byte of a character, where bytes are only a fallback: no other token begins with it
# * Some tokenizers have a text that is not the joined text of their tokens, and so no table of token texts. Their
# engine
#   does not offer healing.


@dataclass(frozen=True, slots=True)
class Healing:
    """The plan for healing one prompt.

    prompt_ids  the prompt without its last token, at least one id
    dropped     the id of the dropped token
    allowed     ids that the first draw may choose from, including ``dropped``
    known       the beginning of the first token's text that the client already has; it is left out
    """

    prompt_ids: tuple[int, ...]
    dropped: int
    allowed: Sequence[int]
    known: str

    def rest(self, text: str) -> str:
        """Return the part of the first token's text that is delivered."""
        return text.removeprefix(self.known)


class Healer:
    """Heals prompts of one vocabulary. Made once when a model is loaded, because it sorts the vocabulary."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        spelled = sorted((data, token_id) for token_id in range(len(pieces.table)) if (data := self._bytes(token_id)))
        self._texts = [data for data, _ in spelled]
        self._ids = [token_id for _, token_id in spelled]
        self.beginning_with = lru_cache(maxsize=64)(self._beginning_with)

    def heal(self, prompt_ids: Sequence[int]) -> Healing | None:
        """Return the plan for healing a prompt; None if the prompt stays as it is."""
        if len(prompt_ids) < 2:
            return None
        before, dropped = tuple(prompt_ids[:-1]), prompt_ids[-1]
        if not self._bytes(dropped):
            return None
        known, _ = TextStream(self._pieces, before).push(dropped)
        return Healing(before, dropped, self.beginning_with(dropped), known)

    def _beginning_with(self, token_id: int) -> tuple[int, ...]:
        """Return the ids, in ascending order, whose text begins with that of ``token_id``."""
        prefix = self._bytes(token_id)
        first = bisect_left(self._texts, prefix)
        last = bisect_left(self._texts, True, first, key=lambda text: not text.startswith(prefix))
        return tuple(sorted(self._ids[first:last]))

    def _bytes(self, token_id: int) -> bytes:
        """Return a token's text; empty for a token that has none or cannot be healed."""
        piece = self._pieces.table[token_id] if 0 <= token_id < len(self._pieces.table) else None
        if piece is None or (isinstance(piece, bytes) and self._pieces.byte_runs):
            return b""
        return piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass")
