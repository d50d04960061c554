"""The tool that proves that a commit only moves code: moves are equal, all else is a difference."""

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tools.definitions import Product, Ref, compare
from tools.product import Module, circles, module_circles, sources

ROOT = Path(__file__).resolve().parents[2]


def modules(files: dict[str, str]) -> list[Module]:
    return [Module(PurePosixPath(path), source) for path, source in files.items()]


def differences(
    before: dict[str, str], after: dict[str, str], *, renames: dict[Ref, str] | None = None, once: tuple[str, ...] = ()
) -> list[str]:
    return compare(Product(modules(before), renames), Product(modules(after)), once).differences


REQUEST = {
    "supervisor/route.py": "LIMIT = 3\nclass Route:\n    hops: int = LIMIT\n",
    "supervisor/in_flight.py": """
from supervisor.route import Route

class InFlight:
    route: Route

    def follow(self) -> Route:
        import supervisor.route

        return supervisor.route.Route()
""",
    "supervisor/loop.py": """
from typing import TYPE_CHECKING
from supervisor import in_flight
if TYPE_CHECKING:
    from supervisor.route import Route

def run(route: "Route") -> in_flight.InFlight:
    return in_flight.InFlight()
""",
}
MERGED = {
    "supervisor/requests/request.py": """
class InFlight:
    route: "Route"

    def follow(self) -> "Route":
        return Route()

class Route:
    hops: int = LIMIT

LIMIT = 3
""",
    "supervisor/loop.py": """
import supervisor.requests.request as requests
from supervisor.requests.request import Route

def run(route: Route) -> requests.InFlight:
    return requests.InFlight()
""",
}


def test_a_merge_of_files_is_no_difference() -> None:
    assert differences(REQUEST, MERGED) == []
    assert differences(MERGED, REQUEST) == []


def test_a_change_is_a_difference_and_its_users_are_not() -> None:
    changed = {name: source.replace("LIMIT = 3", "LIMIT = 4") for name, source in MERGED.items()}
    assert differences(REQUEST, changed) == ["changed: supervisor.route:LIMIT -> supervisor.requests.request:LIMIT"]


def test_what_is_gone_and_what_is_new_is_named() -> None:
    without = MERGED | {"supervisor/loop.py": "def walk(): pass\n"}
    assert differences(REQUEST, without) == ["gone: supervisor.loop:run", "new: supervisor.loop:walk"]


TWO = {
    "protocol/one.py": "def read(): return 1\n",
    "protocol/two.py": "def read(): return 2\n",
}


@pytest.mark.parametrize("used", ["one", "two"])
def test_a_name_that_means_another_object_is_a_difference(used: str) -> None:
    user = "from protocol.{} import read\ndef use(): return read()\n"
    moved = {"protocol/first.py": TWO["protocol/one.py"], "protocol/second.py": TWO["protocol/two.py"]}
    place = {"one": "first", "two": "second"}
    before = TWO | {"gateway/app.py": user.format(used)}
    right = moved | {"gateway/app.py": user.format(place[used])}
    wrong = moved | {"gateway/app.py": user.format(place["two" if used == "one" else "one"])}
    assert differences(before, right) == []
    (found,) = differences(before, wrong)
    assert found.startswith("refers to something else: gateway.app:use -> gateway.app:use: read#")


def test_objects_of_one_name_and_text_are_told_apart_by_what_they_use() -> None:
    used = "from protocol.{} import N\ndef get(): return N\n"
    before = {
        "protocol/a.py": "N = 1\n",
        "protocol/b.py": "N = 2\n",
        "gateway/a.py": used.format("a"),
        "gateway/b.py": used.format("b"),
        "gateway/app.py": "from gateway.a import get\nGET = get\n",
    }
    same = before | {"gateway/a.py": before["gateway/b.py"], "gateway/b.py": before["gateway/a.py"]}
    assert differences(before, same | {"gateway/app.py": "from gateway.b import get\nGET = get\n"}) == []
    (found,) = differences(before, same)
    assert found.startswith("refers to something else: gateway.app:GET")


def test_a_rename_is_named() -> None:
    before = TWO | {"gateway/app.py": "import protocol.two\ndef use(): return protocol.two.read()\n"}
    after = {
        "protocol/both.py": "def read(): return 1\ndef read_more(): return 2\n",
        "gateway/app.py": "from protocol.both import read_more\ndef use(): return read_more()\n",
    }
    assert differences(before, after, renames={Ref("protocol.two", "read"): "read_more"}) == []
    assert differences(before, after) != []
    with pytest.raises(SystemExit, match=r"protocol.two:gone is not defined"):
        differences(before, after, renames={Ref("protocol.two", "gone"): "read_more"})


def test_equal_definitions_can_become_one() -> None:
    before = {"protocol/a.py": "T = 1\nA = T\n", "protocol/b.py": "T = 1\nB = T\n"}
    after = {"protocol/a.py": "T = 1\nA = T\nB = T\n"}
    (found,) = differences(before, after)
    assert found == "stood 2 times (protocol.a:T, protocol.b:T), stands 1 times (protocol.a:T)"
    assert differences(before, after, once=("T",)) == []


@pytest.mark.parametrize(
    "body",
    [
        "def f(limit): return limit",
        "def f():\n    limit = 1\n    return limit",
        "def f(x): return [limit for limit in x]",
        "f = lambda limit: limit",
        "def f(x):\n    for limit in x: print(limit)",
        "def f(x):\n    with x as limit: print(limit)",
        "def f(x):\n    try: pass\n    except ValueError as limit: print(limit)",
        "def f(x):\n    match x:\n        case [limit, *_]: return limit",
        "def f(x): return (limit := x) + limit",
        "def f(x):\n    def g(): return limit\n    limit = 1\n    return g",
        "class C:\n    limit = 1\n    more = limit",
    ],
)
def test_a_local_variable_is_not_the_object_of_the_module(body: str) -> None:
    """The object of the module has another meaning afterwards. Only what uses the object may show that."""
    before = TWO | {"gateway/app.py": f"from protocol.one import read as limit\n{body}\n"}
    after = TWO | {"gateway/app.py": f"from protocol.two import read as limit\n{body}\n"}
    assert differences(before, after) == []


@pytest.mark.parametrize(
    "body",
    [
        "def f(): return limit",
        "def f(x=limit): pass",
        "def f(limit=limit): pass",
        "def f(x: limit): pass",
        "def f(x: 'list[limit]'): pass",
        "def f() -> limit: pass",
        "def f(x): return [y for y in limit]",
        "f = lambda: limit",
        "def f():\n    def g(limit): pass\n    return limit",
        "class C:\n    limit = 1\n    def m(self): return limit",
        "class C(limit): pass",
        "@limit\ndef f(): pass",
        "X = f'{limit()}'",
        "def f():\n    global limit\n    limit = 1",
        "def f():\n    with limit() as x: pass",
        "limit()",
    ],
)
def test_every_use_of_a_name_counts(body: str) -> None:
    before = TWO | {"gateway/app.py": f"from protocol.one import read as limit\n{body}\n"}
    after = TWO | {"gateway/app.py": f"from protocol.two import read as limit\n{body}\n"}
    assert differences(before, after) != []


def test_an_import_in_a_function_means_the_same_as_one_of_the_module() -> None:
    before = TWO | {"gateway/app.py": "def f():\n    from protocol.one import read\n    return read()\n"}
    after = TWO | {"gateway/app.py": "from protocol import one\ndef f():\n    return one.read()\n"}
    assert differences(before, after) == []


def test_strings_are_compared_by_what_they_name() -> None:
    before = REQUEST | {
        "modelctl/a.py": 'WHERE = ["supervisor.route", "supervisor.route:Route", "supervisor/route.py"]\n'
    }
    after = MERGED | {
        "modelctl/a.py": 'WHERE = ["supervisor.requests.request", "supervisor.requests.request:Route",'
        ' "supervisor/requests/request.py"]\n'
    }
    assert differences(before, after) == []
    wrong = {**after, "modelctl/a.py": after["modelctl/a.py"].replace("request:Route", "request:InFlight")}
    assert differences(before, wrong) == ["changed: modelctl.a:WHERE -> modelctl.a:WHERE"]


def test_a_string_may_name_an_object_by_a_module_that_imports_it() -> None:
    one = {"protocol/one.py": "def read(): pass\n"}
    text = {"gateway/app.py": 'X = "as protocol.two.read does"\n'}
    before = {**one, "protocol/two.py": "from protocol.one import read\n", **text}
    after = {"protocol/two.py": "def read(): pass\n", **text}
    assert differences(before, after) == []


def test_the_attributes_behind_an_object_count() -> None:
    before = {"protocol/a.py": "class A: pass\n", "gateway/app.py": "from protocol.a import A\nX = A.one\n"}
    after = {"protocol/a.py": "class A: pass\n", "gateway/app.py": "from protocol.a import A\nX = A.two\n"}
    assert differences(before, before) == []
    assert differences(before, after) == ["changed: gateway.app:X -> gateway.app:X"]


def test_the_documentation_of_an_assignment_belongs_to_it() -> None:
    assert differences({"protocol/a.py": "A = 1\n'''One.'''\n"}, {"protocol/a.py": "A = 1\n"}) != []


def test_statements_with_effects_keep_their_order() -> None:
    one = {
        "gateway/a.py": "def f(): pass\nf()\nprint(1)\n",
        "gateway/b.py": "print(2)\nif __name__ == '__main__': f()\n",
    }
    merged = {"gateway/c.py": "print(2)\ndef f(): pass\nf()\nif __name__ == '__main__': f()\nprint(1)\n"}
    assert differences(one | {"gateway/b.py": "from gateway.a import f\n" + one["gateway/b.py"]}, merged) == []
    turned = {"gateway/c.py": "print(2)\ndef f(): pass\nprint(1)\nf()\nif __name__ == '__main__': f()\n"}
    assert differences(merged, turned) == ["statements with effects in another order: gateway.c -> gateway.c"]
    assert differences(merged, {"gateway/c.py": merged["gateway/c.py"].replace("print(1)", "print(3)")}) == [
        "statement with effects, gone: gateway.c:line 5",
        "statement with effects, new: gateway.c:line 5",
    ]


def test_circles() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from protocol.a import A\n"
    assert module_circles(modules({"protocol/a.py": "from protocol import b\n", "protocol/b.py": typed})) == (
        [],
        [["protocol.a", "protocol.b"]],
    )
    late = "def f():\n    from protocol.a import A\n"
    assert module_circles(modules({"protocol/a.py": "import protocol.b\n", "protocol/b.py": late}))[0] == [
        ["protocol.a", "protocol.b"]
    ]


def test_the_command(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    def write(files: dict[str, str]) -> None:
        for name, source in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(source)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "tools.definitions", "--repository", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    git("init", "-q")
    write(REQUEST | {"supervisor/fast.pyx": "from protocol.a cimport x\ncdef int y = 1\n"})
    git("add", ".")
    git("commit", "-qm", "before")
    for name in REQUEST:
        (tmp_path / name).unlink()
    write(MERGED | {"supervisor/fast.pyx": "from protocol.b cimport x\ncdef int y = 1\n"})
    assert len(sources("--worktree", repository=tmp_path)) == 2
    same = run("HEAD", "--worktree", "--circles")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "4 definitions before, 4 after, 0 differences" in same.stdout

    listed = tmp_path / "renames.txt"
    listed.write_text("supervisor.loop:run=walk  # the word of the wire\n")
    write({"supervisor/loop.py": MERGED["supervisor/loop.py"].replace("run(", "walk(")})
    assert run("HEAD", "--worktree", "--list", str(listed)).returncode == 0
    write({"supervisor/fast.pyx": "cdef int y = 2\n"})
    changed = run("HEAD", "--worktree")
    assert changed.returncode == 1
    assert "gone: supervisor.loop:run" in changed.stdout
    assert "compiled source, gone or changed: fast.pyx" in changed.stdout
