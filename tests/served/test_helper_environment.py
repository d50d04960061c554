"""Helper processes read hostile input, so their environment must not contain variables of the user's shell."""

from pathlib import Path

import psutil
import pytest

from tests.conftest import Serve
from tests.serving import is_alive

SECRET = "HF_TOKEN=hf_not_for_helpers"
REGEX = "[A-Z][a-z]{1,8} [a-z]{1,8}"


def environment(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")


@pytest.mark.long
def test_helpers_do_not_inherit_secrets(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*SECRET.split("="))
    serving = serve({"stories": {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu"}})
    with serving.client() as client:
        messages = [{"role": "user", "content": "Tell me a story about Mia the fox."}]
        client.complete("stories", messages=messages, regex=REGEX, max_tokens=20)
        worker = serving.worker("stories")
        helpers = [
            process
            for process in serving.processes()
            if process.pid not in (serving.pid, worker.pid) and "resource_tracker" not in " ".join(process.cmdline())
        ]
        assert SECRET in environment(worker), "this test looks at the right place"
        assert len(helpers) >= 3, "the guard, the renderer of chats, the compiler of constraints"
        for helper in helpers:
            assert not is_alive(helper) or SECRET not in environment(helper), helper.cmdline()
