"""Strings that an answer must not hold: what may be delivered, what waits, and where to draw anew. Pure Python.

The engine pushes each token that it draws with the text that the token completes. Text that may be the beginning of a
banned string is held, and so are the tokens that it came with: what a client was given cannot be taken back. When a
banned string is complete, the answer goes back to the token in which the string began. There, behind the same tokens,
that token may not be drawn again: ``blocked`` says so. Further hits at the same place add to it.

How this meets the rest:

* The search is over the text as it would be delivered, without regard to case. A stop string cuts the text first: what
  stands behind its beginning is not delivered and bans nothing.
* Nothing is delivered by halves: a token is final, with its id, its log-probability and its whole text, or it is held.
* A way back can make delivered text the beginning of a banned string, which it was not with the tokens that are void
  now. Then the first token behind the delivered ones is blocked. Where that could happen to a stop string, it is held.
* At an end token or at the limit of tokens, held text is delivered (``finish``), for it was no banned string. If it is
  one (because text held for a stop string is let go), the answer goes back and has not ended.
* Tokens taken back count neither as completion tokens nor against the limits. Behind a return, every place has another
  random number than before (engines/draws).
* Work is bounded. After MOST_IN_A_ROW returns without a token delivered in between, or more returns in all than the
  answer may have tokens and MOST_IN_A_ROW beside, the answer ends as it is, with the reason "banned_strings"
  (FinishReason.BANNED). So it does (``give_up``) where no token is left to draw.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from model_worker.stop_strings import StopMatcher
from protocol.messages import FinishReason

MOST_IN_A_ROW = 100
"""Returns without a token delivered in between. Every one costs at most as many tokens as a banned string has
characters (256), and a model that has been led away from a hundred ways on is not going to find one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the newest token means.

    tokens   how many of the held tokens, from the oldest on, are final now
    text     their text
    back_to  None, or how many drawn tokens of the answer are kept: all later ones are void, and the next one is drawn
             in their place, none of ``blocked``
    ended    None, or why the answer ends here: "stop" (a stop string; every token counts), or "banned_strings" (no way
             on was found; held tokens beyond ``tokens`` are void)
    """

    tokens: int = 0
    text: str = ""
    back_to: int | None = None
    ended: str | None = None


class BannedStrings:
    """The judge of one answer's text. A token's position is how many tokens were drawn, and kept, before it.

    banned   strings that the text must not hold; empty ones are ignored
    stops    strings that end the answer
    minimum  tokens in which no stop string is looked for
    limit    tokens that the answer may have
    healed   the first token heals the prompt (engines/healing): it is none of ``minimum`` and ``limit``
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
        self._final = 0  # tokens delivered
        self._start = 0  # characters delivered
        self._before = ""  # the last of them: as many as a banned string may have begun with
        self._ids: list[int] = []  # of the tokens held, and their texts
        self._texts: list[str] = []
        self._boundaries: deque[tuple[int, int]] = deque()
        """(tokens, characters) of the answer up to places where it can be cut: behind whole characters, outside of what
        may be a stop string."""
        self._blocked: dict[int, set[int]] = {}  # by position, for the tokens that stand before it now
        # characters of the answer; those that no stop string takes back; those in which no banned string begins
        self._end = self._passed = self._safe = 0
        self._resume()

    @property
    def position(self) -> int:
        """Of the token to be drawn next."""
        return self._final + len(self._ids)

    @property
    def blocked(self) -> frozenset[int]:
        """Ids that must not be drawn next."""
        return frozenset(self._blocked.get(self.position, ()))

    def push(self, token_id: int, text: str) -> Verdict:
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

    def finish(self, text: str = "") -> Verdict:
        """The answer ends behind the newest token, by an end token (which is not pushed) or its length.

        text  what the detokenizer still held

        Delivers everything, unless the verdict says ``back_to`` or ``ended``: then a banned string was in what was
        held, or a stop string.
        """
        found = self._search(text, self.position, self.position > self._minimum)  # the text is that of tokens drawn
        if not found and not self._hit:
            self._pass_on(self._stop.flush())
        if self._hit:
            return self._go_back()
        self._texts.append(text)
        if found:
            return self._deliver(len(self._ids), self._passed - self._start, FinishReason.STOP)
        return self._deliver(len(self._ids), self._end - self._start)

    def give_up(self) -> Verdict:
        """No token is left that may be drawn next: the answer ends with what it has."""
        return self._deliver(len(self._ids), self._end - self._start, FinishReason.BANNED)

    def _resume(self) -> None:
        """Search on from ``_end``, behind what is kept. What may have begun by then is in its last characters."""
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
        """Whether a stop string ends in the answer's next text. Notes ``_hit`` and where the answer can be cut."""
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

    def _release(self) -> Verdict:
        """What lies before a place where it can be cut and no banned string may have begun."""
        tokens, end = self._final, self._start
        while self._boundaries and self._boundaries[0][1] <= self._safe:
            tokens, end = self._boundaries.popleft()
        return self._deliver(tokens - self._final, end - self._start) if tokens > self._final else _NOTHING

    def _deliver(self, count: int, characters: int, ended: str | None = None) -> Verdict:
        text = "".join(self._texts if count == len(self._ids) else self._texts[:count])[:characters]
        del self._ids[:count], self._texts[:count]
        self._final += count
        self._start += len(text)
        self._before = (self._before + text)[-self._reach :] if self._reach else ""
        if count:
            self._in_a_row = 0
        for position in [p for p in self._blocked if p < self._final]:
            del self._blocked[position]
        return Verdict(count, text, None, ended)

    def _go_back(self) -> Verdict:
        """A banned string begins at ``_safe``: block its first token, drop it and all behind it. Where it began in what
        is delivered (it did not go on like that then), that is the first token behind."""
        number, end = 0, self._start
        while number < len(self._texts) and end + len(self._texts[number]) <= self._safe:
            end += len(self._texts[number])
            number += 1
        if end >= self._safe:  # its first character: tokens without text before it are parts of that
            while number and not self._texts[number - 1] and not (self._healed and self._final + number == 1):
                number -= 1
        position = self._final + number
        self._in_a_row += 1
        self._left -= 1
        blocked = self._ids[number] if number < len(self._ids) else None  # None: a broken character told at the end
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
        return Verdict(back_to=position)


_NOTHING = Verdict()


def fold(text: str) -> str:
    """Without regard to case, character by character: "ß" has no single character for its capital form and stays."""
    folded = text.casefold()
    if len(folded) == len(text):  # no character becomes none, so each has become one
        return folded
    return "".join(f if len(f := c.casefold()) == 1 else low if len(low := c.lower()) == 1 else c for c in text)
