"""Compare paged batches without flash-attn with the package's own way: ``paged=False``, one job at a time.

    python -m benchmarks.unpaged [--model 1b] [--gpu 0]

One side is the whole product, from client to client: 32 streams through a supervisor. The other side is the package's
dynamic generator with ``paged=False`` in this process, with its defaults without flash-attn: SDPA, which does not mask
the future while a prompt is read. The setting with which it computes correctly (``no_sdpa``) is shown beside it.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Request, Server, arguments_for, entry, quiet_heap, requests, served
from benchmarks.report import Result, write

STREAMS = 32
TOKENS = 256
UNPAGED_JOBS = 3
UNPAGED_TOKENS = 96


def unpaged_rates(model_dir: str, asked: Sequence[Request], no_sdpa: bool) -> list[float]:
    """Return the tokens per second of each job, without the first job, which only warms up."""
    import torch

    from model_worker.engines.exllamav2.load import import_package

    package = import_package()
    core, dynamic = package.core, package.generator
    config = core.ExLlamaV2Config(model_dir)
    config.max_seq_len = 2048
    config.no_flash_attn = config.no_xformers = True
    config.no_sdpa = no_sdpa
    model: Any = core.ExLlamaV2(config)
    model.load()
    cache = core.ExLlamaV2Cache(model, batch_size=1, max_seq_len=2048)
    generator = dynamic.ExLlamaV2DynamicGenerator(
        model=model, cache=cache, tokenizer=core.ExLlamaV2Tokenizer(config), max_batch_size=1, paged=False
    )
    quiet_heap()
    rates = []
    for request in asked[: 1 + UNPAGED_JOBS]:
        begun = time.perf_counter()
        generator.enqueue(
            dynamic.ExLlamaV2DynamicJob(
                input_ids=torch.tensor([request.ids]),
                max_new_tokens=UNPAGED_TOKENS,
                gen_settings=dynamic.ExLlamaV2Sampler.GatewaySettings.greedy(),
            )
        )
        tokens = 0
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                got = result.get("token_ids")
                tokens += 0 if got is None else got.shape[-1]
        rates.append(tokens / (time.perf_counter() - begun))
    model.unload()
    return rates[1:]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", help="default: 1b, or tiny with --quick")
    arguments = parser.parse_args()
    model = arguments.model or ("tiny" if arguments.quick else "1b")
    tokens = 16 if arguments.quick else TOKENS
    made = entry(arguments, model, STREAMS, STREAMS * 512)
    with Server({model: made}) as server:
        attention = server.status(model)["attention"]
        prompts = [requests(model, made["model_dir"], STREAMS, seed=number) for number in range(4)]
        rates = [served(server, model, asked, tokens).rate for asked in prompts]
    whole = statistics.median(rates[1:])
    results = [Result(f"{model}, {STREAMS} streams, served: {attention}", whole, "tok/s")]
    if arguments.engine == "exllamav2":
        for no_sdpa, how, target in ((False, "paged=False", ">= 60"), (True, "paged=False and no_sdpa", None)):
            asked = requests(model, made["model_dir"], STREAMS)
            fallback = statistics.median(unpaged_rates(made["model_dir"], asked, no_sdpa))
            results += [
                Result(f"{model}, {how}, one job at a time", fallback, "tok/s"),
                Result(f"served over {how}", whole / fallback, "ratio", target),
            ]
    write("unpaged", results, arguments.out)


if __name__ == "__main__":
    main()
