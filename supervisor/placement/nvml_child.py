"""A program that asks NVML, and does nothing else. It may hang with the driver, or be killed, at any moment.

A GPU that has fallen off the bus makes calls into the driver take seconds, or for ever. The driver's library alone
takes 18 MB. The supervisor must not have these costs. So ``gpu_reader.GpuReader`` starts this file as a program, with
``python -I -S``, and asks one question at a time. The program imports the standard library, pynvml, setproctitle and
the helper's end of the link only.

    python -I -S nvml_child.py DIRECTORY...

DIRECTORY  where pynvml, setproctitle and ``protocol`` are found
stdin      the link (``helper_link``), both ways. Its records are JSON, as ``gpus`` describes
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_LONGEST_ANSWER = 1 << 17
"""``MAX_ANSWER`` of ``gpus``, which this program does not import."""
_MASK_WORDS = 64
"""Words of 64 bits: enough for 4096 CPUs, or NUMA nodes."""


class _Nvml:
    """Asks nvidia-ml-py. Every call may raise NVMLError, and may take for ever."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def fixed(self) -> list[dict[str, Any]]:
        """Return the facts about each GPU that never change."""
        nvml, scope = self._nvml, self._nvml.NVML_AFFINITY_SCOPE_NODE
        return [
            {
                "uuid": _text(nvml.nvmlDeviceGetUUID(h)),
                "cpus": list(self._asked(nvml.nvmlDeviceGetCpuAffinity, h, _MASK_WORDS) or ()),
                "numa_nodes": list(self._asked(nvml.nvmlDeviceGetMemoryAffinity, h, _MASK_WORDS, scope) or ()),
            }
            for h in self._handles
        ]

    def now(self, only: list[int] | None) -> list[dict[str, Any]]:
        """Return the memory, processes and sensors of all GPUs, or memory and processes of those with the indices
        ``only``. That question is asked many times a second while memory comes back, and nobody reads its sensors."""
        wanted = range(len(self._handles)) if only is None else only
        return [
            {"index": i, **self._gpu(handle), **(self._sensors(handle) if only is None else {})}
            for i, handle in enumerate(self._handles)
            if i in wanted
        ]

    def _gpu(self, handle: Any) -> dict[str, Any]:
        # Ask for the processes first. Memory that a process takes between the two calls is then counted twice: as used,
        # and as memory that the process is about to take. In the other order this memory would count as free, and be
        # promised to another worker.
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "total": memory.total,
            "used": memory.used,
            "free": memory.free,
            "processes": [[p.pid, p.usedGpuMemory] for p in processes],
            "mig": (self._asked(self._nvml.nvmlDeviceGetMigMode, handle) or (0,))[0] == 1,
        }

    def _sensors(self, handle: Any) -> dict[str, int | None]:
        # On an H200 each of these questions takes 0.05 ms, and nvmlDeviceGetPowerManagementLimit ten times that. The
        # enforced limit is also the true one: the least of those of the driver, the board and the administrator.
        nvml = self._nvml
        rates = self._asked(nvml.nvmlDeviceGetUtilizationRates, handle)
        return {
            "utilization": None if rates is None else rates.gpu,
            "temperature": self._asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "power": self._asked(nvml.nvmlDeviceGetPowerUsage, handle),
            "power_limit": self._asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        }

    def _asked(self, question: Callable[..., Any], *about: Any) -> Any:
        """Return the answer to a question that not every GPU and driver answers; None if there is none."""
        try:
            return question(*about)
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # old releases of the package return bytes


def _packed(message: dict[str, Any]) -> bytes:
    packed = json.dumps(message).encode()
    if len(packed) <= _LONGEST_ANSWER:
        return packed
    kept = {key: value for key, value in message.items() if key != "gpus"}
    return json.dumps({**kept, "error": "more processes hold memory than can be told"}).encode()


def _main() -> None:
    sys.path += sys.argv[1:]
    from protocol.process.helper_link import become_helper, serve

    # Do this before the driver is opened. After that this process may hang, and not notice that the link was closed.
    link = become_helper("NVML reader")
    try:
        import pynvml
    except ImportError as e:
        link.send(_packed({"absent": f"the package nvidia-ml-py cannot be imported: {e}"}))
        return
    try:
        nvml = _Nvml(pynvml)
        link.send(_packed({"gpus": nvml.fixed()}))
    except pynvml.NVMLError as e:
        link.send(_packed({"absent": str(e)}))
        return

    def answer(question: bytes) -> None:
        asked = json.loads(question)
        begun = time.monotonic()
        try:
            answer: dict[str, Any] = {"gpus": nvml.now(asked["only"])}
        except pynvml.NVMLError as e:
            answer = {"error": str(e)}
        link.send(_packed({"number": asked["number"], "took_s": time.monotonic() - begun, **answer}))

    serve(link, answer)


if __name__ == "__main__":
    _main()
    os._exit(0)  # closing the driver may hang, too
