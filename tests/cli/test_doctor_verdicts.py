"""The doctor's verdicts, from facts of machines that are not here."""

import time
from pathlib import Path
from typing import Any

import pytest

from modelctl.cli import findings
from modelctl.cli.findings import Finding, Verdict, ok, within

GIB = 1 << 30
H200 = {
    "index": 1, "name": "NVIDIA H200", "total": 140 * GIB, "free": 100 * GIB, "mig": False, "width": 16, "widest": 16,
    "persistent": True, "capability": [9, 0], "processes": [],
}  # fmt: skip
NVML = {"driver": "580.95", "cuda": 13000, "gpus": [H200]}
ENGINE = {
    "torch": "2.11.0", "cuda": "13.0", "why_no_gpu": None, "capabilities": [[9, 0]], "architectures": ["sm_90"],
    "exllamav2": "0.3.2", "compiled": True, "sources": 47, "nvcc": None, "flash_attn": None, "triton": "3.6.0",
}  # fmt: skip
NO_GPU = {"absent": "NVML Shared Library Not Found"}
EXL2 = frozenset({"exllamav2"})


def verdicts(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.what, str(each.verdict)) for each in found]


def engine_of(engine: dict[str, Any], nvml: Any = NVML, engines: frozenset[str] = EXL2) -> dict[str, Finding]:
    """Return the last finding about each thing."""
    return {each.what: each for each in findings.engine_of(engine, nvml, engines)}


def test_a_good_machine_has_nothing_to_do() -> None:
    found = [
        *findings.driver_of(NVML, wanted=True),
        *findings.gpu_of(H200, {}),
        *findings.engine_of(ENGINE, NVML, EXL2),
    ]
    assert {each.verdict for each in found} == {Verdict.OK}
    assert "580.95, for CUDA up to 13.0" in found[0].says
    assert found[1].says == "NVIDIA H200, 100.0 GiB of 140.0 GiB free"


def test_a_driver_is_needed_only_by_models_on_gpus() -> None:
    assert verdicts(findings.driver_of(NO_GPU, wanted=False)) == [("driver", "ok")]
    (missing,) = findings.driver_of(NO_GPU, wanted=True)
    assert (missing.verdict, "nvidia-smi" in missing.remedy) == (Verdict.BAD, True)


@pytest.mark.parametrize(
    ("changed", "verdict", "says", "remedy"),
    [
        ({"mig": True}, "bad", "MIG", "nvidia-smi -mig 0"),
        ({"width": 4}, "warn", "4 of 16 lanes", "slot"),
        ({"persistent": False}, "warn", "persistence", "nvidia-smi -pm 1"),
        ({"capability": [6, 1]}, "warn", "6.1", "Volta"),
        ({"processes": [[77, 12 * GIB]]}, "warn", "12.0 GiB held by pid 77 (python train.py)", "what is left"),
        ({"processes": [[78, None]]}, "warn", "memory held by pid 78 (of another", "what is left"),
    ],
)
def test_what_a_gpu_may_lack(changed: dict[str, Any], verdict: str, says: str, remedy: str) -> None:
    _, found = findings.gpu_of(H200 | changed, {77: "python train.py"})
    assert (str(found.verdict), found.what) == (verdict, "GPU 1")
    assert says in found.says
    assert remedy in found.remedy


def test_our_own_workers_are_no_strangers_on_a_gpu() -> None:
    assert len([*findings.gpu_of(H200 | {"processes": [[5, GIB]]}, {5: "modelctl: worker llama"})]) == 1
    silent = dict.fromkeys(("total", "free", "width", "widest", "capability"))
    assert verdicts([*findings.gpu_of(H200 | silent, {})]) == [("GPU 1", "ok")]


@pytest.mark.parametrize(
    ("changed", "what", "verdict", "text"),
    [
        ({"torch": None}, "torch", "bad", "pip install 'modelctl[exllamav2]'"),
        ({"cuda": None, "why_no_gpu": "torch was built for the CPU"}, "torch", "bad", "build of torch for CUDA"),
        ({"cuda": "13.2", "why_no_gpu": "too old"}, "torch", "bad", "newer driver"),
        ({"why_no_gpu": "no access"}, "torch", "bad", "CUDA_VISIBLE_DEVICES"),
        ({"exllamav2": None}, "exllamav2", "bad", "pip install 'modelctl[exllamav2]'"),
        ({"compiled": False}, "exllamav2", "bad", "CUDA toolkit"),
        ({"compiled": False, "nvcc": "/usr/bin/nvcc"}, "exllamav2", "warn", "47 files"),
        ({"triton": None}, "attention", "bad", "pip install"),
        ({"triton": None, "flash_attn": "2.8.0"}, "attention", "ok", "flash-attn 2.8.0"),
        ({"absent": "no answer within 120 s"}, "torch", "bad", "no answer"),
    ],
)
def test_what_the_packages_may_lack(changed: dict[str, Any], what: str, verdict: str, text: str) -> None:
    found = engine_of(ENGINE | changed)[what]
    assert str(found.verdict) == verdict
    assert text in f"{found.says} {found.remedy}"


def test_packages_that_no_model_needs_may_be_missing() -> None:
    bare = ENGINE | {"torch": None, "exllamav2": None, "triton": None}
    assert {each.verdict for each in engine_of(bare, NO_GPU, frozenset()).values()} == {Verdict.OK}
    cpu = ENGINE | {"compiled": False, "cuda": None, "why_no_gpu": "torch was built for the CPU"}
    assert {each.verdict for each in engine_of(cpu, NO_GPU, frozenset({"transformers"})).values()} == {Verdict.OK}


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (findings.python_of(("3", "12")), "ok", "3.12"),
        (findings.python_of(("3", "14")), "warn", "3.13"),
        (findings.descriptors_of(100, 200), "bad", "100 are allowed, and 200 are needed"),
        (findings.descriptors_of(1000, 200), "warn", "LimitNOFILE"),
        (findings.descriptors_of(1 << 20, 200), "ok", "1048576"),
        (findings.memory_of(64 * GIB, None), "ok", "64.0 GiB free"),
        (findings.memory_of(64 * GIB, 2 * GIB), "warn", "2.0 GiB of them for this container"),
        (findings.shared_memory_of(64 << 20), "warn", "--shm-size"),
        (findings.shared_memory_of(None), "warn", "tmpfs"),
        (findings.shared_memory_of(GIB), "ok", "1.0 GiB free"),
        (findings.numa_of(0), "ok", "1 node"),
        (findings.numa_of(2), "ok", "2 nodes"),
    ],
)
def test_the_machine(found: Finding, verdict: str, text: str) -> None:
    assert str(found.verdict) == verdict
    assert text in f"{found.says} {found.remedy}"


@pytest.mark.parametrize(
    ("writable", "free", "verdict"),
    [(True, 50 * GIB, "ok"), (True, 1000, "warn"), (True, 0, "bad"), (False, 50 * GIB, "bad"), (True, None, "warn")],
)
def test_a_disk(writable: bool, free: int | None, verdict: str) -> None:
    place = findings.WrittenDirectory("logs", Path("/var/log/modelctl"), Path("/var/log"), writable, free)
    found = findings.disk_of(place)
    assert str(found.verdict) == verdict
    assert bool(found.remedy) is (verdict != "ok")


def test_a_look_that_hangs_or_fails_is_a_finding() -> None:
    def hangs() -> list[Finding]:
        time.sleep(600)
        return []

    def fails() -> list[Finding]:
        raise OSError("the disk is gone")

    (found,) = within("disk", hangs, 0.01)
    assert (found.verdict, "did not answer" in found.says) == (Verdict.BAD, True)
    (found,) = within("disk", fails)
    assert (found.verdict, "the disk is gone" in found.says) == (Verdict.BAD, True)
    assert within("disk", lambda: [ok("disk", "fine")]) == [ok("disk", "fine")]
