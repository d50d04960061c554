"""What the cluster adds stands behind the launcher and the placement: few files of the supervisor outside of
``supervisor/cluster`` speak of nodes."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
KNOW: Final = {
    "supervisor/config/file.py": "reads the section cluster and the key node of a model, also from the environment",
    "supervisor/config/models.py": "declares the key node",
    "supervisor/config/rules.py": "checks both against other keys",
    "supervisor/config/server.py": "declares the section cluster",
    "supervisor/config/report.py": "shows the section cluster in `config --effective`",
    "supervisor/config/reading.py": "reads the words of the key node",
    "supervisor/logs/events.py": "has the kind of events that users see",
    "supervisor/fleet/replicas.py": "shows node in `status` as long as there is no process",
    "supervisor/loop.py": "makes the launcher",
    "supervisor/status.py": "has the part cluster of `status`, and says which troubles everybody may see",
    "supervisor/workers/launcher.py": "is the interface, and has what the launcher is asked for",
}
"""The files that may speak of the cluster, and why. Those of the command line show the words to users, and are not
looked at."""
ELSE: Final = {
    "supervisor/config/yaml_source.py": "nodes of a YAML file",
    "supervisor/config/foreign.py": "machines of the network",
}
"""The files in which the words mean something else."""
_WORDS: Final = re.compile(
    r"(?<![A-Za-z])(?:[Nn]odes?|[Cc]lusters?|[Rr]ay|[Aa]gents?)(?![a-z])"
    r"|(?<![A-Z])(?:NODES?|CLUSTERS?|RAY|AGENTS?)(?![A-Z])"
    r"|\b(?:[Oo]ther |[Aa]nother )machines?\b|(?<!workers\.)\bmachines\b"
)
_HARMLESS: Final = re.compile(r"(?i)numa[ _]nodes?|scope_node|user-agent|demo:agent")


def speaks_of_nodes(text: str) -> list[int]:
    """Return the numbers of the lines that speak of the cluster, its nodes or its agents."""
    return [n for n, line in enumerate(text.splitlines(), 1) if _WORDS.search(_HARMLESS.sub("", line))]


def test_few_files_know_the_cluster() -> None:
    found = {}
    for path in sorted((ROOT / "supervisor").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("supervisor/cluster/"):
            found[name] = speaks_of_nodes(path.read_text())
    new = [f"{name}:{lines[0]}" for name, lines in found.items() if lines and name not in {*KNOW, *ELSE}]
    assert not new, (
        f"{', '.join(new)}: speaks of the cluster or its nodes. Ask the launcher (supervisor/workers/launcher.py) for "
        "what is needed there, and put what differs between machines into supervisor/cluster. If the words mean "
        "something else, choose others, or add the file to ELSE"
    )
    assert not [name for name in {*KNOW, *ELSE} if not found.get(name)], "these do not any more: remove them here"


def test_words_that_count() -> None:
    lines = ["a NodeList", "node_id", "the Ray cluster", "_inode", "numa_nodes: 3", "an agent", "CLUSTER = 1", "array"]
    assert speaks_of_nodes("\n".join(lines)) == [1, 2, 3, 6, 7]
    assert speaks_of_nodes("another machine\nthis machine\nother machines") == [1, 3]
