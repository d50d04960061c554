"""A changed models.yaml is read once, when it has not changed for a moment."""

from pathlib import Path

from supervisor.config.yaml_source import SETTLE_S, ConfigWatch, Signature, signature_of

OLD, HALF, NEW = (1, 10, 5, 0), (2, 4, 5, 0), (3, 12, 6, 0)


def due_at(watch: ConfigWatch, looks: list[tuple[float, Signature | None]]) -> list[float]:
    return [now for now, signature in looks if watch.due(signature, now)]


def test_a_change_is_read_once_and_only_when_it_is_whole() -> None:
    looks: list[tuple[float, Signature | None]] = [(0.5, OLD), (1.0, HALF), (1.5, NEW), (2.0, NEW), (2.5, NEW)]
    looks += [(3.0 + 0.5 * n, NEW) for n in range(20)]
    assert due_at(ConfigWatch(OLD), looks) == [1.5 + SETTLE_S]


def test_a_file_that_is_replaced_may_be_missing_for_a_while() -> None:
    missing: list[tuple[float, Signature | None]] = [(float(n), None) for n in range(10)]
    assert due_at(ConfigWatch(OLD), [*missing, (10.0, NEW), (11.0, NEW)]) == [11.0]
    assert due_at(ConfigWatch(OLD), [*missing, (10.0, OLD), (12.0, OLD)]) == [], "it is the old one again"


def test_a_file_is_told_from_another_of_the_same_size(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    assert signature_of(file) is None
    file.write_text("a")
    before = signature_of(file)
    other = tmp_path / "other"
    other.write_text("b")
    other.replace(file)
    assert None not in (before, signature_of(file))
    assert signature_of(file) != before
