"""Check whether a worker takes the VRAM that was estimated: every cache mode, 1B and 8B, and the 1B as GPTQ.

    python -m benchmarks.cache_vram [--gpu 0]

The measured value is the memory that NVML shows for the worker's process after a long prompt and full batches, minus
the CUDA context. The context is what NVML shows, in the same run, for a process that only creates one. The estimate
(``model_worker.engines.exllamav2.vram``) is made from file headers before anything is loaded. It includes the kernels
that a worker loads into its context.
"""

from benchmarks.harness import Server, arguments_for, entry, requests, served, spec_of
from benchmarks.memory import GIB, MIB, context_bytes, memory
from benchmarks.report import Result, write

MODES = ("FP16", "Q8", "Q6", "Q4")
BATCH, CONTEXT, CACHE_SIZE = 16, 4096, 32768
LONG_PROMPT = 3500


def exercise(server: Server, name: str, directory: str, quick: bool) -> None:
    served(server, name, requests(name, directory, 1, 600 if quick else LONG_PROMPT), 16)
    for seed in range(2):
        served(server, name, requests(name, directory, BATCH, 200, seed), 48)


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--models", nargs="+", help="default: 1b 8b 1b-gptq, or tiny with --quick")
    arguments = parser.parse_args()
    gpu = arguments.engine == "exllamav2"
    held = memory(arguments.gpu)
    context = context_bytes(held) if gpu else 0
    results = [Result("CUDA context", context / MIB, "MiB")]
    for model in arguments.models or (["tiny"] if arguments.quick else ["1b", "8b", "1b-gptq"]):
        made = entry(arguments, model, BATCH, CACHE_SIZE, 2048 if arguments.quick else CONTEXT)
        entries = {f"{model}-{mode.lower()}": made | {"cache_mode": mode} for mode in MODES} if gpu else {model: made}
        with Server(entries) as server:
            for name in entries:
                exercise(server, name, made["model_dir"], arguments.quick)
            for name, one in entries.items():
                status = server.wait_idle(name)
                measured = sum(held.of(status["pid"]).values()) - context
                results.append(Result(f"{name}: measured, less the context", measured / GIB, "GiB"))
                if gpu:
                    from model_worker.engines.exllamav2.vram import estimate

                    expected = estimate(spec_of(one)).total
                    off = 100 * abs(measured / expected - 1)
                    results += [
                        Result(f"{name}: estimated", expected / GIB, "GiB"),
                        Result(f"{name}: measured is off the estimate by", off, "%", "<= 3"),
                    ]
        write("cache-vram", results, arguments.out)  # also when a later model fails


if __name__ == "__main__":
    main()
