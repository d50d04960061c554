"""The faults of machines and networks, for workers that run on other machines (``--nodes``)."""

import os
import random

from tests.chaos import engine as engines

MACHINES = ("one", "two")
LEASE_S = float(os.environ.get("CHAOS_LEASE_S", 3.0))
"""The lease of machines. On a machine that is very busy, an agent may not run for 3 s. Then this must be longer."""
SHORT_S, LONG_S = (0.1, 1.0), (LEASE_S + 0.6, LEASE_S + 1.6)
"""How long a network is cut: surely shorter, and surely longer than the lease."""
NOTICED_S = (0.75 * LEASE_S, 10 * LEASE_S)
"""Times after which the driver declares a silent machine dead: before the supervisor gives it up, or long after."""

OF_MACHINES = ("cut long", "reset link", "kill driver", "machine gone", "suspend machine")
"""Faults that may cost each model on other machines all its workers."""
OF_AGENTS = ("kill agent", "stop agent")
HARMLESS = ("cut short", "pause driver")
"""Faults that must cost nobody anything but time."""
MAY_BE_SILENT = (*OF_MACHINES, *OF_AGENTS)
"""Faults of which the supervisor learns only when a lease is over."""
WEIGHTS = {
    "kill agent": 3, "stop agent": 1, "cut short": 6, "cut long": 1, "reset link": 2, "kill driver": 1,
    "pause driver": 3, "machine gone": 1, "suspend machine": 1,
}  # fmt: skip
ORDERS = ("stop", "stop now", "restart", "restart worker", "reload", "reload changed", "exchange", "beside",
          "stop and start", "restart twice")  # fmt: skip
CARDS: tuple[tuple[str, str], ...] = (
    *[("kill agent", "")] * 12, *[("stop agent", "")] * 6, *[("cut short", "")] * 18, *[("cut long", "")] * 8,
    *[("reset link", "")] * 8, *[("kill driver", "")] * 5, *[("pause driver", "")] * 8, *[("machine gone", "")] * 8,
    *[("suspend machine", "")] * 6, *[("kill", "")] * 10, *[("stop", "")] * 2, *[("pause worker", "")] * 6,
    *[("pause", "")] * 6, *(("order", what) for what in ORDERS),
    *(("trouble", what) for what in (*engines.RAISES, *engines.ENDS, *engines.NONSENSE, *engines.HARMLESS)),
    *(("load trouble", what) for what in engines.LOAD_TROUBLES if what != "hang"),
    *[("client", "leaving")] * 4, *[("client", "far")] * 4, *[("client", "cut")] * 4,
)  # fmt: skip
"""The main fault of each episode, as in ``plan.CARDS``."""
FINALS = ("sigkill while a machine is cut off",)
"""Ends of a supervisor, beside those of ``plan.FINALS``."""


def lasts_s(draw: random.Random, kind: str) -> float:
    """Draw how long a fault of this module lasts."""
    if kind == "cut short":
        return draw.uniform(*SHORT_S)
    if kind in ("cut long", "suspend machine"):
        return draw.uniform(*LONG_S)
    if kind == "pause driver":
        return draw.choice([0.1, 1.0])
    if kind == "machine gone":
        return draw.choice([0.5, LEASE_S + 1.0])
    return 0.0


def nodes_of_models(models: dict[str, dict[str, object]], at: int) -> None:
    """Put models on other machines.

    Model b is on this machine in every third block: no fault elsewhere concerns it. It is also on this machine beside
    model z, since the first worker of this machine takes descriptors that the supervisor keeps.
    """
    models["a"]["node"] = "others"
    node = (None, "one", "others")[at % 3]
    if node is not None and "z" not in models:
        models["b"]["node"] = node
