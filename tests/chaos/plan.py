"""The plan of an episode, as a pure function of (seed, episode).

Times are seconds from the beginning of the episode. What the processes do at these times may differ between runs.
"""

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from protocol import limits
from tests.chaos import engine as engines
from tests.chaos import node_plan
from tests.serving import engine

BLOCK = 30
"""Number of episodes on one supervisor."""
DECK = 5 * BLOCK
"""Number of episodes in which each of ``CARDS`` is dealt once."""
MODELS = ("a", "b")
"""Model a has two workers, model b has one. Some blocks also have model ``z``, which is lazy, and sleeps."""
RIVALS = ("x", "y")
"""Two lazy models of which only one may be loaded. They are on this machine, and only the fault ``rival`` asks them."""
BUSY_ASKS = 300
"""Requests that keep a model busy for half a minute, two at a time, if the other model does not get its turn before."""
SECRET = "sesame"
"""A word in every prompt. It must appear in no log and in no error message."""
SPAN_S = 0.15
"""Seconds from the beginning of an episode within which load and faults begin."""
WINDOW = limits.STREAM_WINDOW
ENDLESS = 15_000

TROUBLES = (*engines.RAISES, *engines.ENDS, *engines.HANGS, *engines.NONSENSE, *engines.HARMLESS)
ORDERS = (
    "stop", "stop now", "start", "restart", "restart worker", "reload", "reload changed", "reload invalid", "exchange",
    "beside", "stop and start", "restart twice", "nonsense",
)  # fmt: skip
SLEEPS = ("sleep", "wake", "sleep and wake", "kill on the way")
"""Faults of model z alone."""
WANTS = ("wait", "both", "kill", "leave", "deadline")
"""Faults of the models ``RIVALS``: a client keeps one busy, and another client wants the other one. ``both``: that one
is kept busy, too. ``kill``: the busy one's worker dies. ``leave``: the waiting requests are cancelled."""
READERS = ("goes on", "stays away")
"""What becomes of a reader of standard output that stops. One that stays away does so until another episode's goes on,
perhaps to the end of the block."""
DETAILS = {
    "trouble": TROUBLES, "load trouble": engines.LOAD_TROUBLES, "order": ORDERS, "sleep": SLEEPS, "rival": WANTS,
    "reader stops": READERS,
}  # fmt: skip
FAULTS = {
    "kill": 4, "stop": 1, "pause worker": 8, "kill guard": 3, "trouble": 6, "load trouble": 1, "full disk": 1,
    "descriptors": 2, "pause": 8, "flood": 1, "order": 3, "sleep": 3, "rival": 2,
    "reader stops": 2, "refused bodies": 1,
}  # fmt: skip
"""Weights of the faults that an episode may have besides its card. The module ``faults`` describes them."""
ON_TOP = 0.15
"""Share of the episodes that have faults besides their card."""
CLIENTS = {"plain": 10, "long": 1, "slow": 1, "deaf": 1, "library": 4, "leaving": 3, "killed": 1, "far": 3, "cut": 3}
"""Weights of the kinds of clients. An episode usually has two to four clients, and always a plain one."""
Card = tuple[str, str]
CARDS: tuple[Card, ...] = (
    *(("trouble", what) for what in (*TROUBLES, *engines.HARMLESS, *engines.HARMLESS)),
    *(("load trouble", what) for what in engines.LOAD_TROUBLES),
    *(("order", what) for what in (*ORDERS, "start", "reload", "reload invalid", "nonsense")),
    *[("kill", "")] * 5, ("stop", ""), *[("pause worker", "")] * 8, *[("kill guard", "")] * 5, *[("pause", "")] * 7,
    *[("full disk", "")] * 2, *[("refused bodies", "")] * 2, *[("descriptors", "")] * 3, *[("flood", "")] * 4,
    *[("client", "slow")] * 6, *[("client", "deaf")] * 4, *[("client", "leaving")] * 10, *[("client", "killed")] * 6,
    *[("client", "far")] * 8, *[("client", "cut")] * 8, *(("sleep", what) for what in (*SLEEPS, *SLEEPS)),
    *(("rival", what) for what in WANTS),
    *(("reader stops", what) for what in (*READERS, *READERS)),
)  # fmt: skip
"""The main fault of each episode: (kind of fault, detail), or ("client", kind) for a client that is a fault itself.
Faults that need a new worker take the most time, so most of them are in the deck only once."""
FINALS = (
    "sigkill", "sigkill while one is stopped", "sigkill while one comes up", "sigkill with the guard", "shutdown",
    "shutdown now", "sigterm", "sigterm twice",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request. ``trouble``: (fault, "once" or "always"). The prompt contains both too."""

    request: int
    model: str
    prompt: str
    tokens: int
    route: dict[str, Any] = field(default_factory=dict)
    cancel_at: float | None = None
    trouble: tuple[str, str] | None = None


@dataclass(frozen=True)
class ClientPlan:
    """One client connection. ``number`` is unique within the episode."""

    number: int
    kind: str
    at: float
    asks: tuple[Ask, ...]
    leaves_at: float | None = None
    delay_s: float = 0.0
    cut_after: int = 0
    """Bytes, in both directions together, after which the proxy cuts the connection; 0: never."""


@dataclass(frozen=True)
class FaultPlan:
    """One fault. ``place``: index of the model's worker; ``lasts_s``: its duration."""

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
    nodes: bool = False
    """Whether workers run on other machines."""


@dataclass(frozen=True)
class BlockPlan:
    """The settings with which a supervisor is started. ``descriptors``: its limit of open files, 0 for the system's."""

    number: int
    models: dict[str, dict[str, Any]]
    restart: dict[str, Any]
    poison: dict[str, Any]
    descriptors: int
    stall: str
    """The time for which a client may leave its stream unread."""
    compiled: bool
    """True to use the compiled fast path, False for the Python reference."""
    noticed_s: float = 0.0
    """Seconds after which the driver declares a silent machine dead; 0: no worker runs on another machine."""

    @property
    def poison_limit(self) -> int:
        return int(self.poison["limit"])

    @property
    def restart_limit(self) -> int:
        return int(self.restart["limit"])


SHORT_STALL, SHORT_STALL_S = "1s", 1.0
GRANTS_EVERY_S = 0.1
"""Seconds between two credits of a slow client: often enough that its stream is not ended."""
RESTART_WINDOW_S = 60.0
WATCH = {"start": 15, "load": 2, "idle": 1.5, "step": 1}
STOP = {"drain": "2s", "shutdown": "500ms", "sigterm": "300ms"}


def plan_block(seed: int, number: int, nodes: bool = False) -> BlockPlan:
    draw = random.Random(f"{seed} blocks {number // (DECK // BLOCK)}")  # drawn for a deck: each card suits a block
    limits = draw.sample([1000, 1000, 1000, 4, 4], 5)
    poison = draw.sample([2, 2, 2, 3, 100], 5)
    descriptors = draw.sample([0, 0, 0, 512, 512], 5)
    stalls = draw.sample([SHORT_STALL, SHORT_STALL, SHORT_STALL, "60s", "60s"], 5)
    lazy = draw.randrange(5)
    compiled = draw.sample([True, True, True, False, False], 5)
    at = number % (DECK // BLOCK)
    entry = engine(step_s=0.001, max_batch_size=4, context=20_000) | {"engine": "tests.chaos.engine:Troublesome"}
    models = {"a": entry | {"replicas": 2}, "b": dict(entry)}
    if at == lazy:
        models["z"] = entry | {"lazy": True, "sleep_after": "200ms", "ttl": "1500ms"}
    if not nodes:
        models["x"] = entry | {"lazy": True, "ttl": "1500ms"}
        models["y"] = models["x"] | {"sleep": "off"}
    if nodes:
        node_plan.nodes_of_models(models, number)
    return BlockPlan(
        number,
        models,
        restart={"limit": limits[at], "window": f"{RESTART_WINDOW_S:g}s", "initial": "10ms", "max": "100ms"},
        poison={"limit": poison[at], "window": "10m"},
        descriptors=descriptors[at],
        stall=stalls[at],
        compiled=compiled[at],
        noticed_s=node_plan.NOTICED_S[number % 2] if nodes else 0.0,
    )


def _suits(card: Card, block: BlockPlan) -> bool:
    kind, detail = card
    if kind == "flood":
        return block.descriptors > 0
    if kind in ("sleep", "rival"):
        return ("z" if kind == "sleep" else RIVALS[0]) in block.models
    if kind == "full disk":  # giving up is checked in the log, which a full disk cuts off
        return block.restart_limit >= 1000
    return detail != "deaf" or kind != "client" or block.stall == SHORT_STALL


@lru_cache(4)
def _deal(seed: int, deck: int, nodes: bool) -> tuple[Card, ...]:
    """Return the cards of a deck's episodes, in order."""
    cards = random.Random(f"{seed} deck {deck}").sample(node_plan.CARDS if nodes else CARDS, DECK)
    blocks = [plan_block(seed, (deck * DECK + at) // BLOCK, nodes) for at in range(DECK)]
    for at in range(DECK):
        if not _suits(cards[at], blocks[at]):
            other = next(i for i in range(DECK) if _suits(cards[at], blocks[i]) and _suits(cards[i], blocks[at]))
            cards[at], cards[other] = cards[other], cards[at]
    return tuple(cards)


def _final(seed: int, block: int, nodes: bool) -> str:
    """Return how a block's supervisor ends. Consecutive blocks end in different ways."""
    finals = FINALS + node_plan.FINALS if nodes else FINALS
    way, at = divmod(block, len(finals))
    return random.Random(f"{seed} ends {way}").sample(finals, len(finals))[at]


def plan_episode(seed: int, number: int, only: tuple[str, ...] = (), nodes: bool = False) -> EpisodePlan:
    """Return the plan of an episode.

    only   kinds of faults to draw from, instead of those of the block
    nodes  whether workers run on other machines
    """
    draw = random.Random(f"{seed} episode {number}")
    block = plan_block(seed, number // BLOCK, nodes)
    lazy = "z" in block.models
    final = _final(seed, number // BLOCK, nodes) if number % BLOCK == BLOCK - 1 else None
    cards = []
    if only:
        cards += [(kind, "") for kind in draw.choices(only, k=draw.choice([1, 1, 2]))]
    else:
        cards.append(_deal(seed, number // DECK, nodes)[number % DECK])
        if draw.random() < ON_TOP:
            on_top = FAULTS | node_plan.WEIGHTS if nodes else FAULTS
            cards += [(kind, "") for kind in _several(draw, on_top, draw.choice([1, 1, 2]))]
    cards = [card for card in cards if _suits(card, block)]
    others = {kind: n for kind, n in CLIENTS.items() if _suits(("client", kind), block)}
    kinds = ["plain", *(detail for kind, detail in cards if kind == "client")]
    kinds += _several(draw, others, max(0, draw.choice([2, 3, 3, 4]) - len(kinds)))
    clients = [_client(draw, seed, number, at, kind, lazy) for at, kind in enumerate(kinds)]
    faults = []
    for kind, detail in cards:
        if kind == "client":
            continue
        fault = _fault(draw, kind, detail, block)
        faults.append(fault)
        if kind == "trouble":
            clients.append(_trouble(draw, seed, number, len(clients), fault))
        elif kind == "rival":
            clients += _rivals(draw, seed, number, len(clients), fault)
    faults.sort(key=lambda fault: fault.at)
    return EpisodePlan(seed, number, tuple(clients), tuple(faults), final, nodes)


def _several(draw: random.Random, weights: dict[str, int], count: int) -> list[str]:
    return draw.choices(list(weights), list(weights.values()), k=count)


def _client(draw: random.Random, seed: int, episode: int, number: int, kind: str, lazy: bool) -> ClientPlan:
    count = {"long": 1, "slow": 1, "deaf": 1, "library": 3, "killed": 2}.get(kind) or draw.randint(2, 6)
    models = [*MODELS, *MODELS, "z"] if lazy and draw.random() < 0.4 else MODELS
    asks = []
    for request in range(1, count + 1):
        tokens = draw.choice([1, draw.randint(1, 20), draw.randint(20, 120)])
        if kind in ("long", "slow"):
            tokens = draw.randint(WINDOW, 600)
        elif kind == "deaf":
            tokens = draw.randint(2 * WINDOW, 800)
        elif kind in ("leaving", "killed", "cut") and draw.random() < 0.3:
            tokens = ENDLESS  # too long to finish: the engine must drop the request when the client leaves
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


def _fault(draw: random.Random, kind: str, detail: str, block: BlockPlan) -> FaultPlan:
    model, place = draw.choice(("a", "a", "b")), draw.randrange(2)
    at, lasts, count = draw.uniform(0, SPAN_S), 0.0, 1
    detail = detail or draw.choice(DETAILS.get(kind, ("",)))
    if kind == "sleep":
        model = "z"
    elif kind == "rival":
        model = draw.choice(RIVALS)
    if kind == "trouble":
        # if the limit is too high to poison a request, one that breaks every worker would take most of a minute
        always = detail not in (*engines.HARMLESS, *engines.HANGS) and block.poison_limit < 10 and draw.random() < 0.4
        detail = f"{detail}|{'always' if always else 'once'}|{draw.randrange(30)}"
    elif kind == "load trouble":
        count = 1 if detail == "hang" else draw.choice([1, 1, 2, 6])
    elif kind in ("pause", "pause worker"):
        lasts = draw.choice([0.02, 0.1, 0.3])
    elif kind == "reader stops":
        lasts = draw.choice([0.05, 0.3])
    elif kind == "descriptors":
        lasts = draw.choice([0.05, 0.2])
    elif kind in node_plan.WEIGHTS:
        model, lasts = "a", node_plan.lasts_s(draw, kind)
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


def _rivals(draw: random.Random, seed: int, episode: int, number: int, fault: FaultPlan) -> list[ClientPlan]:
    """Return a client that keeps the fault's model busy, and a client that wants the other model."""
    (other,) = {*RIVALS} - {fault.model}

    def asks(
        model: str, count: int, most: int, route: dict[str, Any], cancel_at: float | None = None
    ) -> tuple[Ask, ...]:
        made = []
        for request in range(1, count + 1):
            prompt = f"{SECRET} {seed} {episode} {fault.at} {model} {request}"
            made.append(Ask(request, model, prompt, draw.randint(most // 2, most), route, cancel_at))
        return tuple(made)

    wants_at = fault.at + draw.uniform(0, 0.8)
    count = 12 if fault.detail == "both" else draw.randint(1, 2)
    route = {"progress": draw.random() < 0.5}
    if fault.detail == "deadline":
        route["deadline_ms"] = draw.choice([100, 400, 1500])
    leaves_at = wants_at + draw.uniform(0, 0.6) if fault.detail == "leave" else None
    return [
        ClientPlan(number, "steady", fault.at, asks(fault.model, BUSY_ASKS, 200, {})),
        ClientPlan(number + 1, "rival", wants_at, asks(other, count, 120, route, leaves_at)),
    ]
