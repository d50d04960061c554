"""Claude Code works with a local model: it calls tools, looks tools up, goes on, and says why a request was refused.

``make test-claude-code`` installs the package and runs this file. ``make test`` does not, because it needs npm.
Claude Code reaches the gateway, and no other machine: every other connection goes to a proxy that does not exist.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving

CLAUDE = ROOT / ".venv" / "claude" / "node_modules" / ".bin" / "claude"
ENGINE = {"model_dir": ".", "engine": "tests.agent_engine:AgentEngine"}


class Gateway:
    """A gateway with two local models, and a key for it. ``ask`` runs Claude Code."""

    def __init__(self, port: int, token: str, directory: Path) -> None:
        self._port, self._token, self.directory = port, token, directory

    def ask(self, prompt: str, *arguments: str, **environment: str) -> dict[str, Any]:
        """Return the result that Claude Code reports for a prompt."""
        nowhere = f"http://127.0.0.1:{free_port()}"
        settings = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory / "home"),
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{self._port}",
            "ANTHROPIC_AUTH_TOKEN": self._token,
            "ANTHROPIC_MODEL": "claude-local",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "claude-local",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [str(CLAUDE), "-p", prompt, "--output-format", "json", *arguments],
            cwd=self.directory,
            env=settings | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("work")
    (directory / "home").mkdir()
    keys = tmp_path_factory.mktemp("keys") / "keys"
    token = KeyStore(keys).add_token("agent", parse_rights("infer"))
    port = free_port()
    models: dict[str, Any] = {"claude-local": ENGINE, "claude-small": ENGINE | {"options": {"context": 8192}}}
    with Serving(models, gateway={"listen": port}, keys=keys):
        yield Gateway(port, token, directory)


def order(tool: str, **arguments: Any) -> str:
    """Return the text that has the model call a tool."""
    return f"call {tool} with {json.dumps(arguments)}"


def test_it_reads_a_file_and_writes_another(gateway: Gateway) -> None:
    read, written = gateway.directory / "read.txt", gateway.directory / "written.txt"
    read.write_text(order("Write", file_path=str(written), content="Łódź — done") + "\n")
    told = gateway.ask(order("Read", file_path=str(read)), "--allowedTools", "Read,Write")
    assert (told["is_error"], told["num_turns"], told["stop_reason"]) == (False, 3, "end_turn"), told
    assert told["result"].startswith("The tool says: File created successfully")
    assert written.read_text() == "Łódź — done"
    usage = told["modelUsage"]["claude-local"]
    assert usage["inputTokens"] > 30_000  # of three requests
    assert usage["thinkingTokens"] > 0
    assert usage["contextWindow"] == 65_536


def test_it_looks_a_tool_up(gateway: Gateway) -> None:
    told = gateway.ask(order("ToolSearch", query="select:WebFetch", max_results=3))
    assert (told["is_error"], told["result"]) == (False, "The tool says: The tool WebFetch is available now."), told


def test_a_conversation_goes_on(gateway: Gateway) -> None:
    first = gateway.ask("hello")
    assert first["result"] == "Hello from the local model."
    second = gateway.ask("and now?", "--resume", first["session_id"])
    assert (second["result"], second["session_id"]) == (first["result"], first["session_id"])
    counted = [told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"] for told in (first, second)]
    assert counted[1] > counted[0]


def test_it_understands_why_a_request_was_refused(gateway: Gateway) -> None:
    long = gateway.ask("hello", ANTHROPIC_MODEL="claude-small")
    assert long["is_error"]
    assert "Prompt is too long" in long["result"]
    assert "(limit 8191)" in long["result"]
    missing = gateway.ask("hello", ANTHROPIC_MODEL="claude-none")
    assert "issue with the selected model (claude-none)" in missing["result"]
    stranger = gateway.ask("hello", ANTHROPIC_AUTH_TOKEN="mctl_unknown")
    assert (stranger["is_error"], stranger["api_error_status"]) == (True, 401), stranger
