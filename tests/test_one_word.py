"""One word means one thing: no public name is given to two classes of the product."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("modelctl", "supervisor", "gateway", "protocol", "model_worker")
BOTH_ARE_PUBLIC = {"PromptLogprobs"}
"""What a client gets, and what an engine gives. Programs of users name both."""


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 500, "the classes were not found"
    assert {name: where for name, where in places.items() if len(where) > 1}.keys() == BOTH_ARE_PUBLIC
