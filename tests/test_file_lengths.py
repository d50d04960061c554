"""No source file is longer than 400 lines without a reason that is written here."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 400
REASONS = {
    "model_worker/outbox.pyx": "one compiled class: its functions are inlined into one another, within one C file",
    "tests/chaos/episode.py": "the course of one episode, from its beginning to its checks",
    "tests/engines/hostile_directories.py": "one table of cases, read from the top to the bottom",
    "tests/model_worker/test_outbox.py": "the compiled class and its Python twin are given the same examples",
    "tests/on_ray.py": "one Ray cluster for all tests, which takes seconds to start",
    "tests/supervisor/test_probation.py": "one model of workers and suspects, which every test drives",
    "tests/supervisor/test_scheduler.py": "one harness around the scheduler, which every test drives",
    "tests/supervisor/test_scheduler_machine.py": "one state machine: hypothesis draws from all rules of a class",
    "tests/supervisor/test_tcp_port.py": "one port with its clients, which every test drives",
    "tests/system/test_keys_matrix.py": "one served port for all tests: each verb with each role, and all outsiders",
}


def test_a_long_file_has_a_reason() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.pyx"], cwd=ROOT, capture_output=True, text=True, check=True)
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in listed.stdout.splitlines()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST and name not in REASONS} == {}
    assert [name for name in REASONS if name not in lengths] == []
