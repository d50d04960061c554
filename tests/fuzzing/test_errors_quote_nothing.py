"""No error contains a text of the request that caused it, since errors end up in the logs of clients and servers."""

import random
from typing import Any

from protocol.chat import parse_question
from protocol.codec import pack_body
from protocol.errors import WireError
from protocol.request import parse_generate
from tests.fuzzing.corpus import CHAT, REQUESTS
from tests.fuzzing.running import SEED

CANARY = "trombone"
WRONG: list[Any] = [
    -5,
    (1 << 64) - 1,
    float("nan"),
    CANARY,
    [CANARY],
    {"a": CANARY},
    b"\xff",
    True,
    None,
    [[CANARY]] * 300,
]


def marked(value: Any, chance: random.Random, odd: bool = False) -> Any:
    """Return the request with the canary in every text, and here and there an invalid value."""
    if odd and chance.random() < 0.15:
        return chance.choice(WRONG)
    if isinstance(value, dict):
        return {key: marked(inner, chance, True) for key, inner in value.items()}
    if isinstance(value, list):
        return [marked(inner, chance, True) for inner in value]
    if isinstance(value, str) and value not in ("system", "user", "assistant", "tool", "steady"):
        return f"{CANARY} {value} {CANARY}" * chance.choice((1, 1, 40))
    return value


def test_no_error_quotes_a_text() -> None:
    print(f"TEST_SEED={SEED}")
    chance = random.Random(SEED)
    parts: list[str] = []
    for _ in range(4000):
        request = marked(chance.choice([*REQUESTS, CHAT]), chance)
        try:
            body = pack_body(request)
        except OverflowError:
            continue
        for read in (parse_generate, lambda body: parse_question("tokenize", body)):
            try:
                read(body)
            except WireError as e:
                parts.append(f"{e} {e.field}")
    assert len(parts) > 4000
    assert not [error for error in parts if CANARY in error]
    assert len(set(parts)) > 50
