"""A service manager is told of the ready supervisor, its states, its reloads and its end, and is fed in time."""

import pytest

from supervisor.service import (
    EXTEND_S,
    LOOK_S,
    Environment,
    ServiceReports,
    ServiceView,
    WorkerView,
    status_text,
    take_environment,
)
from supervisor.workers.life import WorkerState

EXTEND = f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}"


def view(
    *states: str, gateway: str | None = "", listen: str = "", reloading: bool = False, stopping: bool = False
) -> ServiceView:
    """Return a view of workers a, b, ... in these states. A worker whose state begins with "lazy " is not awaited."""
    workers = [
        WorkerView("abcdef"[i], WorkerState(state.removeprefix("lazy ")), not state.startswith("lazy "))
        for i, state in enumerate(states)
    ]
    return ServiceView(workers, gateway, listen, reloading, stopping)


def ready_reports(watchdog_s: float | None = None) -> ServiceReports:
    reports = ServiceReports(watchdog_s)
    assert "READY=1" in reports.due(view("ready"), 0.0)
    return reports


@pytest.mark.parametrize("state", ["starting", "loading", "backoff", "draining", "stopping"])
def test_it_is_not_ready_while_a_worker_is_on_its_way(state: str) -> None:
    assert "READY=1" not in ServiceReports().due(view("ready", state), 0.0)


@pytest.mark.parametrize("state", ["ready", "failed", "stopped", "unloaded", "lazy loading"])
def test_it_is_ready_when_each_awaited_worker_is_or_will_not_come(state: str) -> None:
    assert ServiceReports().due(view("ready", state), 0.0)[0] == "READY=1"


def test_it_is_ready_when_the_gateway_serves_or_has_said_why_not() -> None:
    reports = ServiceReports()
    assert "READY=1" not in reports.due(view("ready", gateway=None), 0.0)
    lines = reports.due(view("ready", gateway="cannot listen"), 1.0)
    assert lines == ["READY=1", "STATUS=1 of 1 workers ready; no gateway: cannot listen; ready: a"]


def test_it_is_ready_without_the_port_over_tcp_and_says_so() -> None:
    lines = ServiceReports().due(view("ready", listen="cannot listen on tcp://10.0.0.7:5570"), 0.0)
    assert lines[:2] == ["READY=1", "STATUS=1 of 1 workers ready; cannot listen on tcp://10.0.0.7:5570; ready: a"]


def test_a_long_start_is_extended_and_a_finished_one_is_not() -> None:
    reports = ServiceReports()
    said = [(t, reports.due(view("loading"), float(t))) for t in range(31)]
    assert [t for t, lines in said if EXTEND in lines] == [0, 10, 20, 30]
    assert reports.due(view("ready"), 31.0) == ["READY=1", "STATUS=1 of 1 workers ready; ready: a"]
    assert [reports.due(view("ready"), float(t)) for t in range(32, 99)] == [[]] * 67


def test_a_change_is_told_once() -> None:
    reports = ready_reports()
    assert reports.due(view("backoff"), 1.0) == ["STATUS=0 of 1 workers ready; backoff: a"]
    assert reports.due(view("backoff"), 2.0) == []


def test_the_watchdog_is_fed_twice_within_its_time_also_during_start_and_end() -> None:
    reports = ServiceReports(4.0)
    steps = [i * reports.look_s for i in range(100)]
    views = [view("loading")] * 30 + [view("ready")] * 30 + [view("ready", stopping=True)] * 40
    fed = [t for t, seen in zip(steps, views, strict=True) if "WATCHDOG=1" in reports.due(seen, t)]
    assert fed == [2.0 * i for i in range(13)]


def test_a_short_watchdog_is_looked_at_often_enough() -> None:
    assert ServiceReports(0.4).look_s == 0.1
    assert ServiceReports(30.0).look_s == LOOK_S


def test_a_reload_begins_with_its_time_and_ends_with_ready() -> None:
    reports = ready_reports()
    assert reports.reload_begins(12.5) == ["RELOADING=1", "MONOTONIC_USEC=12500000"]
    assert reports.due(view("ready"), 13.0) == ["READY=1"]
    assert reports.due(view("ready"), 14.0) == []


def test_a_reload_that_nobody_announced_is_told_and_extended() -> None:
    reports = ready_reports()
    status = "STATUS=reloading; 1 of 1 workers ready; ready: a"
    lines = reports.due(view("ready", reloading=True), 50.0)
    assert lines == ["RELOADING=1", "MONOTONIC_USEC=50000000", status, EXTEND]
    assert reports.reload_begins(51.0) == []
    assert reports.due(view("ready", reloading=True), 52.0) == []
    assert reports.due(view("ready"), 53.0) == ["READY=1", "STATUS=1 of 1 workers ready; ready: a"]


def test_no_reload_is_told_before_it_is_ready_or_while_it_stops() -> None:
    reports = ServiceReports()
    assert reports.reload_begins(0.0) == []
    assert not any(line.startswith("RELOADING") for line in reports.due(view("loading", reloading=True), 0.0))
    reports = ready_reports()
    assert "STOPPING=1" in reports.due(view("draining", stopping=True), 1.0)
    assert reports.reload_begins(2.0) == []


def test_the_end_is_told_once_and_extended_while_it_lasts() -> None:
    reports = ready_reports()
    status = "STATUS=shutting down; 0 of 1 workers ready; draining: a"
    assert reports.due(view("draining", stopping=True), 20.0) == ["STOPPING=1", status, EXTEND]
    assert reports.due(view("draining", stopping=True), 25.0) == []
    assert reports.due(view("draining", stopping=True), 30.0) == [EXTEND]


def test_the_status_names_each_worker_in_one_line_of_bounded_length() -> None:
    assert status_text(view("ready", "lazy unloaded", "failed", "ready")) == (
        "2 of 4 workers ready; ready: a, d; unloaded: b; failed: c"
    )
    assert status_text(view("ready", gateway="two\nlines")) == "1 of 1 workers ready; no gateway: two lines; ready: a"
    many = ServiceView([WorkerView("é" * 60, WorkerState.READY, True)] * 40)
    assert len(status_text(many).encode()) <= 500
    assert status_text(many).endswith("...")


def test_the_variables_are_taken_out_of_the_environment() -> None:
    environment = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7", "PATH": "/bin"}
    assert take_environment(environment, 7) == Environment("/run/x", 30.0)
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "@abstract"}, Environment("@abstract", None)),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "500000"}, Environment("@a", 0.5)),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, Environment("@a", None)),
        ({"WATCHDOG_USEC": "500000"}, None),
    ],
)
def test_what_the_variables_mean(variables: dict[str, str], expected: Environment | None) -> None:
    assert take_environment(variables, 7) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NOTIFY_SOCKET": "vsock:2:1"}, "NOTIFY_SOCKET is 'vsock:2:1', and must be an absolute path or @NAME"),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC is 'soon', and must be a positive number"),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"}, "WATCHDOG_USEC is '0', and must be a positive number"),
    ],
)
def test_variables_that_cannot_be_used_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(":", r"\:")):
        take_environment(variables, 7)
