"""Node programs and packages of other people ask the gateway: streams, calls, second turns, cancelled answers.

``make test-agents`` runs this file. ``make test`` does not, because the programs are downloaded.
"""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.conversation import OMITTED_IMAGE
from tests.agents.harness import PROGRAMS, Place, environment, real_template
from tests.agents.python_programs import HELLO
from tests.claude_code import order
from tests.replaying_engine import CITY
from tests.serving import Serving, wait_until

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="Node and npm are not installed")
REPLAYING = {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine"}
SLOW = {**REPLAYING, "options": {"step_s": 0.2, "answers": {"talk": "And so I say it. " * 500}, "context": 65536}}
SAYS = "Hello from the local model."


@pytest.fixture(scope="module")
def serving(port: int) -> Iterator[Serving]:
    models: dict[str, Any] = {
        "replaying": {**REPLAYING, "options": {"template": real_template()}},
        "claude-local": {"model_dir": ".", "engine": "tests.agent_engine:AgentEngine"},
        "slow": SLOW,
        "claude-slow": {"model_dir": ".", "engine": "tests.agent_engine:AgentEngine", "options": {"step_s": 2}},
    }
    with Serving(models, gateway={"listen": port, "auth": "none"}) as serving:
        yield serving


def picture(path: Path) -> None:
    """Write a picture of eight by eight red points."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    points = zlib.compress((b"\0" + b"\xff\0\0" * 8) * 8)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", points) + chunk(b"IEND", b""))


def test_vercel_ai_sdk(place: Place, serving: Serving) -> None:
    """Its default is the Responses API, where the second request refers to the items of the first answer."""
    shutil.copy(PROGRAMS / "ai_sdk.mjs", environment("ai"))  # Node looks for packages beside the program
    out = place.run("ai", ["node", str(environment("ai") / "ai_sdk.mjs")])
    right = {"streamed": HELLO, "given": [CITY], "steps": 2, "called": HELLO, "again": HELLO, "cancelled": True}
    found = json.loads(out.splitlines()[-1])
    assert found == dict.fromkeys(("responses", "chat", "compatible", "anthropic"), right)
    serving.wait_idle("slow")


def test_codex(place: Place, serving: Serving) -> None:
    home = place.directory / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "claude-local"\nmodel_provider = "local"\napproval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\n[analytics]\nenabled = false\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{place.root}/v1"\nwire_api = "responses"\n'
    )
    variables = {"CODEX_HOME": str(home)}
    command = ["codex", "exec", "--skip-git-repo-check"]

    def codex(*arguments: str) -> str:
        return place.run("codex", [*command, *arguments], **variables)

    file, image = place.directory / "written.txt", place.directory / "red.png"
    picture(image)
    assert "The tool says:" in codex(order("exec_command", cmd=f"printf Łódź > {file}"))
    assert file.read_text() == "Łódź"
    assert OMITTED_IMAGE in codex(order("view_image", path=str(image)))
    assert "invalid agent id" in codex(order("multi_agent_v1__wait_agent", targets=["nobody"]))
    assert SAYS in codex("resume", "--last", "and now?")
    interrupt_agent(place, serving, "codex", [*command, "--model", "claude-slow", "hello"], **variables)


def test_claude_code(place: Place, serving: Serving) -> None:
    variables = {
        "ANTHROPIC_MODEL": "claude-local",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "claude-local",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = ["claude", "--output-format", "json", "--allowedTools", "Read"]
    image = place.directory / "red.png"
    picture(image)

    def claude(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(place.run("claude", [*command, *arguments], **variables))
        return found

    seen = claude("-p", order("Read", file_path=str(image)))
    assert (seen["is_error"], seen["num_turns"]) == (False, 2)
    assert OMITTED_IMAGE in seen["result"]
    again = claude("-p", "and now?", "--resume", seen["session_id"])  # the picture comes again
    assert (again["is_error"], again["result"]) == (False, SAYS)
    slow = variables | {"ANTHROPIC_MODEL": "claude-slow"}
    interrupt_agent(place, serving, "claude", [*command, "-p", "hello"], **slow)


def test_opencode(place: Place, serving: Serving) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.root}/v1", "apiKey": "none"},
        "models": {name: {"tool_call": True} for name in ("claude-local", "claude-slow")},
    }
    settings = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
    (place.directory / "opencode.json").write_text(json.dumps(settings))
    program = str(environment("opencode") / "node_modules" / "opencode-linux-x64-baseline" / "bin" / "opencode")
    command = [program, "run", "--model", "local/claude-local"]
    file = place.directory / "written.txt"  # a word with a blank in it would be quoted
    out = place.run("opencode", [*command, *order("write", filePath=str(file), content="Łódź").split()])
    assert file.read_text() == "Łódź", out
    assert SAYS in place.run("opencode", [*command, "--continue", "and now?"])
    slow = [program, "run", "--model", "local/claude-slow", "hello"]
    interrupt_agent(place, serving, "opencode", slow)


def interrupt_agent(place: Place, serving: Serving, lock: str, command: list[str], **more: str) -> None:
    """Start a program that asks the slow agent, and end it while it waits for the answer."""
    with place.start(lock, command, **more) as process:
        wait_until(lambda: serving.status("claude-slow")["active"], what="the request")
        os.killpg(process.pid, 15)
        try:
            serving.wait_idle("claude-slow")
        finally:
            os.killpg(process.pid, 9)
