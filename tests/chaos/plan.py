"""What happens in an episode: a function of (seed, episode) alone. Pure.

Times are seconds from the begin of the episode. What the plan cannot fix is where the processes are when it happens.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import engine as engines
from tests.serving import engine

BLOCK = 40
"""Episodes that one supervisor lives for."""
MODELS = ("a", "b")
"""Of two workers and one. Blocks may have another, ``z``, which is lazy."""
SECRET = "sesame"
"""In every prompt: it must be in no log and in no message."""
SPAN_S = 0.15
"""In which load and faults begin."""
WINDOW = 256
ENDLESS = 15_000

FAULTS = {
    "kill": 12, "stop": 2, "pause worker": 6, "kill guard": 3, "trouble": 20, "load trouble": 4, "full disk": 4,
    "descriptors": 3, "pause": 8, "flood": 2, "order": 14,
}  # fmt: skip
"""Weights. What each does is in ``faults``."""
TROUBLES = [
    *((what, 4) for what in engines.RAISES), *((what, 4) for what in engines.ENDS),
    *((what, 1) for what in engines.HANGS), *((what, 4) for what in engines.NONSENSE),
    *((what, 10) for what in engines.HARMLESS),
]  # fmt: skip
ORDERS = {
    "stop": 4, "stop now": 4, "start": 2, "restart": 5, "restart worker": 3, "reload": 2, "reload changed": 4,
    "reload invalid": 2, "exchange": 3, "beside": 3, "stop and start": 3, "restart twice": 2, "nonsense": 1,
}  # fmt: skip
FINALS = (
    "sigkill", "sigkill while one is stopped", "sigkill while one comes up", "sigkill with the guard", "shutdown",
    "shutdown now", "sigterm", "sigterm twice",
)  # fmt: skip
CLIENTS = {"plain": 10, "long": 2, "slow": 2, "deaf": 1, "library": 4, "leaving": 3, "killed": 1, "far": 3, "cut": 3}
"""Weights of the kinds; an episode has two to four, and always a plain one."""


@dataclass(frozen=True)
class Ask:
    """One request. ``trouble``: (what, "once" or "always"), which also stands in its prompt."""

    request: int
    model: str
    prompt: str
    tokens: int
    route: dict[str, Any] = field(default_factory=dict)
    cancel_at: float | None = None
    trouble: tuple[str, str] | None = None


@dataclass(frozen=True)
class ClientPlan:
    """One connection. ``number`` tells it from the others of the episode."""

    number: int
    kind: str
    at: float
    asks: tuple[Ask, ...]
    leaves_at: float | None = None
    delay_s: float = 0.0
    cut_after: int = 0
    """Bytes that its proxy lets through, in either direction, before it cuts the connection; 0: does not."""


@dataclass(frozen=True)
class FaultPlan:
    """``model`` and ``place`` (which of its workers) say where, ``detail`` what exactly, ``lasts_s`` for how long."""

    kind: str
    at: float
    model: str
    place: int
    detail: str = ""
    lasts_s: float = 0.0
    count: int = 1


@dataclass(frozen=True)
class EpisodePlan:
    seed: int
    number: int
    clients: tuple[ClientPlan, ...]
    faults: tuple[FaultPlan, ...]
    final: str | None


@dataclass(frozen=True)
class BlockPlan:
    """What a supervisor is started with. ``descriptors``: its limit of them, 0 for the system's."""

    number: int
    models: dict[str, dict[str, Any]]
    restart: dict[str, Any]
    poison: dict[str, Any]
    descriptors: int
    stall: str
    """How long a client may leave its stream unread."""

    @property
    def poison_limit(self) -> int:
        return int(self.poison["limit"])

    @property
    def restart_limit(self) -> int:
        return int(self.restart["limit"])


SHORT_STALL = "1s"
WATCH = {"start": 15, "load": 2, "idle": 1.5, "step": 1}
STOP = {"drain": "2s", "shutdown": "500ms", "sigterm": "300ms"}


def plan_block(seed: int, number: int) -> BlockPlan:
    draw = random.Random(f"{seed} block {number}")
    entry = engine(step_s=0.001, max_batch_size=4, context=20_000) | {"engine": "tests.chaos.engine:Troublesome"}
    models = {"a": entry | {"replicas": 2}, "b": dict(entry)}
    if draw.random() < 0.25:
        models["z"] = entry | {"lazy": True, "ttl": "400ms"}
    limit = draw.choice([1000, 1000, 4])
    return BlockPlan(
        number,
        models,
        restart={"limit": limit, "window": "1m", "initial": "10ms", "max": "100ms"},
        poison={"limit": draw.choice([2, 2, 3, 100]), "window": "10m"},
        descriptors=draw.choice([0, 0, 512]),
        stall=draw.choice([SHORT_STALL, "60s"]),
    )


def plan_episode(seed: int, number: int, only: tuple[str, ...] = ()) -> EpisodePlan:
    """``only``: kinds of faults to draw from, instead of all."""
    draw = random.Random(f"{seed} episode {number}")
    block = plan_block(seed, number // BLOCK)
    lazy = "z" in block.models
    final = draw.choice(FINALS) if number % BLOCK == BLOCK - 1 else None
    others = CLIENTS if block.stall == SHORT_STALL else {kind: n for kind, n in CLIENTS.items() if kind != "deaf"}
    kinds = ["plain", *_several(draw, others, draw.choice([1, 2, 2, 3]))]
    clients = [_client(draw, seed, number, at, kind, lazy) for at, kind in enumerate(kinds)]
    weights = {kind: FAULTS[kind] for kind in only} if only else dict(FAULTS)
    if not block.descriptors:
        weights.pop("flood", None)
    if block.restart_limit < 1000:  # what it gives up on is checked by its log
        weights.pop("full disk", None)
    faults = []
    for kind in _several(draw, weights, draw.choice([1, 1, 1, 1, 2, 3])):
        fault = _fault(draw, kind)
        faults.append(fault)
        if kind == "trouble":
            clients.append(_trouble(draw, seed, number, len(clients), fault))
    faults.sort(key=lambda fault: fault.at)
    return EpisodePlan(seed, number, tuple(clients), tuple(faults), final)


def _several(draw: random.Random, weights: dict[str, int], count: int) -> list[str]:
    return draw.choices(list(weights), list(weights.values()), k=count)


def _client(draw: random.Random, seed: int, episode: int, number: int, kind: str, lazy: bool) -> ClientPlan:
    count = {"long": 1, "slow": 1, "deaf": 1, "library": 3, "killed": 2}.get(kind) or draw.randint(2, 7)
    models = [*MODELS, *MODELS, "z"] if lazy and draw.random() < 0.4 else MODELS
    asks = []
    for request in range(1, count + 1):
        tokens = draw.choice([1, draw.randint(1, 20), draw.randint(20, 200)])
        if kind in ("long", "slow"):
            tokens = draw.randint(WINDOW, 600)
        elif kind == "deaf":
            tokens = draw.randint(2 * WINDOW, 800)
        elif kind in ("leaving", "killed", "cut") and draw.random() < 0.3:
            tokens = ENDLESS  # it has to leave the engine with its client
        cancel_at = draw.uniform(0, 2 * SPAN_S) if kind == "plain" and draw.random() < 0.12 else None
        if cancel_at is not None and draw.random() < 0.5:
            tokens = ENDLESS
        prompt = f"{SECRET} {seed} {episode} {number} {request}" + " x" * draw.choice([0, 0, 50, 1000])
        asks.append(Ask(request, draw.choice(models), prompt, tokens, _route(draw), cancel_at))
    at = draw.choice([0.0, 0.0, draw.uniform(0, SPAN_S)])
    leaves = draw.uniform(at, at + SPAN_S) if kind in ("leaving", "killed") else None
    delay = draw.choice([0.001, 0.005, 0.02]) if kind in ("far", "cut") else 0.0
    cut_after = draw.randint(1, 6000) if kind == "cut" else 0
    return ClientPlan(number, kind, at, tuple(asks), leaves, delay, cut_after)


def _route(draw: random.Random) -> dict[str, Any]:
    route: dict[str, Any] = {}
    if draw.random() < 0.15:
        route["resume"] = False
    if draw.random() < 0.2:
        route["priority"] = draw.choice(["interactive", "normal", "batch"])
    if draw.random() < 0.15:
        route["deadline_ms"] = draw.choice([20, 100, 400, 60_000])
    if draw.random() < 0.05:
        route["ttft_ms"] = draw.choice([5, 50, 60_000])
    if draw.random() < 0.05:
        route["queue_ms"] = draw.choice([1, 50, 60_000])
    if draw.random() < 0.2:
        route["progress"] = True
    return route


def _fault(draw: random.Random, kind: str) -> FaultPlan:
    model, place = draw.choice(("a", "a", "b")), draw.randrange(2)
    at, detail, lasts, count = draw.uniform(0, SPAN_S), "", 0.0, 1
    if kind == "trouble":
        names, weights = zip(*TROUBLES, strict=True)
        what = draw.choices(names, weights)[0]
        once = what in engines.HARMLESS or what in engines.HANGS or draw.random() < 0.6
        detail = f"{what}|{'once' if once else 'always'}|{draw.randrange(30)}"
    elif kind == "load trouble":
        detail = draw.choice(engines.LOAD_TROUBLES)
        count = 1 if detail == "hang" else draw.choice([1, 1, 2, 6])
    elif kind == "order":
        detail = _several(draw, ORDERS, 1)[0]
    elif kind in ("pause", "pause worker"):
        lasts = draw.choice([0.02, 0.1, 0.3])
    elif kind == "descriptors":
        lasts = draw.choice([0.05, 0.2])
    elif kind == "flood":
        count = draw.choice([50, 700])
        lasts = 0.1
    return FaultPlan(kind, at, model, place, detail, lasts, count)


def _trouble(draw: random.Random, seed: int, episode: int, number: int, fault: FaultPlan) -> ClientPlan:
    what, how, at = fault.detail.split("|")
    prompt = f"trouble {fault.detail}|{SECRET} {seed} {episode} {number}"
    route = {"resume": False} if draw.random() < 0.1 else {}
    ask = Ask(1, fault.model, prompt, int(at) + draw.randint(2, 40), route, trouble=(what, how))
    return ClientPlan(number, "plain", fault.at, (ask,))
