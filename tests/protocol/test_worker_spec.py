"""A worker's specification survives being packed, for a process that was started without one."""

from dataclasses import replace

import pytest

from protocol.process.worker_spec import OFF, EngineSpec, Leases, WorkerSpec, pack_spec, unpack_spec

PLAIN = WorkerSpec(EngineSpec("m", "transformers", "/models/m"), 1, "", "ipc:///back", b"W\x00\xff", "/logs/m.log", 7)


@pytest.mark.parametrize(
    "spec",
    [
        PLAIN,
        replace(PLAIN, cpus=(0, 3), reasoning=("<think>", "</think>"), tool_format="hermes", name="m:2"),
        replace(
            PLAIN, reasoning=OFF, leases=Leases(step_s=1.5), sampling={"temperature": 0.5}, limits={"max_tokens": 9}
        ),
        replace(PLAIN, engine=EngineSpec("m", "exllamav2", "/m", "cuda", 4096, 4, {"gpu_split": [1.5, 2]}, sleep=True)),
    ],
)
def test_it_comes_back_as_it_was(spec: WorkerSpec) -> None:
    assert unpack_spec(pack_spec(spec)) == spec
