"""A program that prints what NVML knows of the driver and the GPUs, as JSON. It may hang with the driver.

    python -I -S nvml_facts.py WHERE

WHERE  directory in which pynvml is found
"""

import json
import sys
from typing import Any


def main() -> None:
    """Print {absent} or {driver, cuda, gpus}."""
    sys.path.append(sys.argv[1])
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as e:
        print(json.dumps({"absent": str(e)}))
        return

    def asked(call: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, call)(*arguments)
        except Exception:  # not every GPU and driver answers every question
            return None

    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory, mig = asked("nvmlDeviceGetMemoryInfo", handle), asked("nvmlDeviceGetMigMode", handle)
        name = asked("nvmlDeviceGetName", handle)
        gpus.append(
            {
                "index": index,
                "name": name.decode() if isinstance(name, bytes) else name,
                "total": None if memory is None else memory.total,
                "free": None if memory is None else memory.free,
                "mig": bool(mig and mig[0] == 1),
                "width": asked("nvmlDeviceGetCurrPcieLinkWidth", handle),
                "widest": asked("nvmlDeviceGetMaxPcieLinkWidth", handle),
                "persistent": asked("nvmlDeviceGetPersistenceMode", handle) == 1,
                "capability": asked("nvmlDeviceGetCudaComputeCapability", handle),
                "processes": [
                    [process.pid, process.usedGpuMemory]
                    for process in asked("nvmlDeviceGetComputeRunningProcesses", handle) or ()
                ],
            }
        )
    driver, cuda = asked("nvmlSystemGetDriverVersion"), asked("nvmlSystemGetCudaDriverVersion")
    print(json.dumps({"driver": driver.decode() if isinstance(driver, bytes) else driver, "cuda": cuda, "gpus": gpus}))


if __name__ == "__main__":
    main()
