"""The driver, the GPUs, PyTorch and ExLlamaV2: read by programs of their own, judged by pure functions."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from protocol.process.engine_packages import install_command
from supervisor.cli.detach import child_environment
from supervisor.cli.doctor.findings import Finding, bad, ok, warn
from supervisor.packages import directory_of
from supervisor.spelling import size
from supervisor.worker_modules import ENGINE_PROBE

NVML_S: Final = 20.0
"""Seconds for the driver to answer. Without persistence mode it needs some to open."""
ENGINE_S: Final = 120.0
"""Seconds for the import of PyTorch, from a cold disk too."""
_NVML: Final = Path(__file__).with_name("nvml_facts.py")
OWN: Final = "modelctl: worker"
"""How the command line of a worker begins."""
Facts = Mapping[str, Any]


def read_nvml() -> Facts:
    """Return what ``nvml_facts`` prints, or {absent} with the reason why it does not."""
    where = directory_of("pynvml")
    if where is None:
        return {"absent": "the package nvidia-ml-py is not installed"}
    return _answer([sys.executable, "-I", "-S", str(_NVML), where], NVML_S)


def read_engine() -> Facts:
    """Return what the probe of the engine prints, or {absent} with the reason why it does not."""
    return _answer(list(ENGINE_PROBE), ENGINE_S)


def _answer(command: list[str], seconds: float) -> Facts:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
            env=child_environment(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"absent": f"no answer within {seconds:g} s: the driver or a disk hangs, see `dmesg`"}
    except OSError as e:
        return {"absent": e.strerror or str(e)}
    try:
        found: Facts = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except ValueError:
        return {"absent": ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"}
    return found


def driver_of(nvml: Facts, *, wanted: bool) -> list[Finding]:
    """Judge the driver.

    wanted  whether a model is to run on a GPU
    """
    if why := nvml.get("absent"):
        if not wanted:
            return [ok("driver", f"no NVIDIA GPU can be used ({why}); no model needs one")]
        return [bad("driver", f"no NVIDIA GPU can be used: {why}", "install NVIDIA's driver, and see `nvidia-smi`")]
    return [ok("driver", f"{nvml['driver']}, for CUDA up to {_cuda(nvml['cuda'])}")]


def gpu_of(gpu: Facts, names: Mapping[int, str]) -> list[Finding]:
    """Judge one GPU.

    names  command line of each process on it
    """
    what = f"GPU {gpu['index']}"
    text = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" if gpu["total"] else str(gpu["name"])
    found = [ok(what, text)]
    if gpu["mig"]:
        found.append(bad(what, "MIG divides it, and modelctl takes whole GPUs", "run `nvidia-smi -mig 0` as root"))
    capability = gpu["capability"]
    if capability and tuple(capability) < (7, 0):
        found.append(
            warn(what, f"compute capability {capability[0]}.{capability[1]} is old", "use a GPU from Volta on")
        )
    if gpu["width"] and gpu["widest"] and gpu["width"] < gpu["widest"]:
        found.append(
            warn(
                what, f"its PCIe link has {gpu['width']} of {gpu['widest']} lanes: models load more slowly",
                "look again under load; then see how the card sits in its slot, and which slots share lanes",
            )
        )  # fmt: skip
    if not gpu["persistent"]:
        found.append(
            warn(what, "persistence mode is off: each start waits for the driver", "run `nvidia-smi -pm 1` as root")
        )
    for pid, held in gpu["processes"]:
        name = names.get(pid, "")
        if not name.startswith(OWN):
            amount = "memory" if held is None else size(held)
            says = f"{amount} held by pid {pid} ({name or 'of another container or user'})"
            found.append(warn(what, says, "models get what is left; end it if nobody needs it"))
    return found


def names_of(gpus: Sequence[Facts]) -> dict[int, str]:
    """Return the command line of each process on the GPUs, shortened. It may hold secrets behind options, so only its
    first two words are taken."""
    found = {}
    for pid in {pid for gpu in gpus for pid, _ in gpu["processes"]}:
        try:
            process = psutil.Process(pid)
            found[pid] = " ".join(" ".join(process.cmdline()[:2]).split(" ")[:3]) or process.name()
        except psutil.Error:
            continue
    return found


def engine_of(engine: Facts, nvml: Facts, engines: frozenset[str]) -> Iterator[Finding]:
    """Judge PyTorch and ExLlamaV2.

    engines  of the models in models.yaml. What no model needs may be missing
    """
    if why := engine.get("absent"):
        yield bad("torch", why, "run `python -c 'import torch'` to see more")
        return
    uses_gpu, extra = "exllamav2" in engines, "exllamav2" if "exllamav2" in engines else "embedded"
    if engine["torch"] is None:
        yield (
            bad("torch", "is not installed", f"run {install_command(extra)}") if engines
            else ok("torch", "is not installed; no model needs it")
        )  # fmt: skip
        return
    built = "the CPU" if engine["cuda"] is None else f"CUDA {engine['cuda']}"
    yield ok("torch", f"{engine['torch']}, built for {built}")
    if "absent" not in nvml and engine["why_no_gpu"] and uses_gpu:
        yield bad("torch", f"can use no GPU: {engine['why_no_gpu']}", _cuda_remedy(engine, nvml))
    if not uses_gpu:
        return
    if engine["exllamav2"] is None:
        yield bad("exllamav2", "is not installed", f"run {install_command('exllamav2')}")
        return
    if engine["compiled"]:
        yield ok("exllamav2", f"{engine['exllamav2']}, its CUDA code is compiled")
    elif engine["nvcc"] is None:
        remedy = "install the CUDA toolkit of torch's version, or set CUDA_HOME to where it is"
        yield bad("exllamav2", f"{engine['exllamav2']}: its CUDA code must be compiled, and nvcc is missing", remedy)
    else:
        says = f"{engine['exllamav2']}: the next start compiles {engine['sources']} files of CUDA code, for minutes"
        yield warn("exllamav2", says, "`modelctl serve` does it, and shows the steps")
    flash = engine["flash_attn"]
    used = "our Triton kernels are used" if flash is None else f"flash-attn {flash} is installed"
    if engine["triton"] is None and flash is None:
        yield bad("attention", "neither Triton nor flash-attn is installed", f"run {install_command('exllamav2')}")
    else:
        yield ok("attention", used + (f" (Triton {engine['triton']})" if engine["triton"] else ""))


def _cuda_remedy(engine: Facts, nvml: Facts) -> str:
    """Return what to do if torch cannot use a GPU that the driver has."""
    if engine["cuda"] is None:
        return "install a build of torch for CUDA: see pytorch.org"
    if _number(engine["cuda"]) > (nvml["cuda"] or 0):
        return f"the driver knows CUDA up to {_cuda(nvml['cuda'])}: install a newer driver, or an older build of torch"
    return "see CUDA_VISIBLE_DEVICES, and whether this user may open /dev/nvidia*"


def _cuda(number: int | None) -> str:
    """Return the text of NVML's 13000: "13.0"."""
    return "?" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _number(text: str) -> int:
    major, _, minor = text.partition(".")
    return 1000 * int(major) + 10 * int(minor.partition(".")[0] or 0)
