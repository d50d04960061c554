"""A supervisor writes a line for each request that ends, to the file that models.yaml names."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import WireError
from tests.conftest import Serve
from tests.serving import engine, wait_until


def lines(file: Path) -> list[dict[str, Any]]:
    whole = file.read_text().split("\n")[:-1] if file.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def test_a_reload_begins_the_log_moves_it_and_ends_it(serve: Serve) -> None:
    serving = serve({"m": engine(context=100_000)})
    one, other = serving.directory / "one.jsonl", serving.directory / "logs" / "other.jsonl"
    assert serving.overview()["supervisor"]["request_log"] is None
    with serving.client() as client:
        client.complete("m", "before", max_tokens=1)
        serving.write_sections(request_log="one.jsonl")
        serving.order("reload")
        client.complete("m", "secret", max_tokens=3, trace_ids=["mine"])
        stream = client.generate("m", "cancelled", max_tokens=90_000)
        next(stream)
        stream.cancel()
        stream.complete()
        with pytest.raises(WireError):
            client.complete("m", "fails", regex="secret", max_tokens=1)
        wait_until(lambda: len(lines(one)) == 3)
        first, second, third = lines(one)
        assert (first["trace_ids"], first["finish_reason"], first["tokens"]) == (["mine"], "length", 3)
        assert (first["prompt_tokens"], first["worker"], first["key"]) == (6, "m", None)
        assert first["queue_ms"] <= first["first_token_ms"] <= first["total_ms"]
        assert second["finish_reason"] == "cancelled"
        assert third["error"] == "unsupported"
        assert "secret" not in one.read_text()
        assert serving.overview()["supervisor"]["request_log"] == {"file": str(one), "trouble": None, "lost": 0}
        serving.write_sections(request_log=str(other))
        serving.order("reload")
        client.complete("m", "elsewhere", max_tokens=1)
        wait_until(lambda: len(lines(other)) == 1)
        serving.write_sections(request_log=None)
        serving.order("reload")
        assert serving.overview()["supervisor"]["request_log"] is None
        client.complete("m", "nowhere", max_tokens=1)
    serving.kill(signal.SIGTERM)
    assert len(lines(one)) == 3
    assert len(lines(other)) == 1
