"""Compare ExLlamaV2's fused function row by row with the package's PyTorch code, for a layer of 128 experts and few
rows.

    python -m benchmarks.mixture            needs a CUDA device; about three minutes, most of them to make the model

Both ways are correct (model_worker/engines/exllamav2/load.py says why rows are not fused together). The layers have
the shape of Qwen3-30B-A3B: hidden size 2048, experts of 768, 8 of 128 for each row, EXL2 with 4 bits. Two layers are
computed in turn, on other rows each time. Times are those of the host, including the wait for the GPU, and medians of
rounds. The results show the largest number of rows for which the row-by-row way is faster. ``mixture.ROW_BY_ROW``
should be that number.
"""

import statistics
import time
from typing import Any
from unittest import mock

from benchmarks import report
from benchmarks.harness import arguments_for, entry, spec_of
from model_worker.engines.exllamav2 import load as mixture
from model_worker.engines.exllamav2.check import check

MODEL, QUICK = "30b-a3b-2layers-exl2-rounded", "mixture-exl2-rounded"
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
INPUTS, CALLS, ROUNDS, WARM = 16, 16, 9, 64
"""Different inputs; calls in a round; rounds; calls before the first round, since products are tuned 200 times."""


def milliseconds(layers: list[Any], rows: int, most: int) -> float:
    """Return the median time of a layer for ``rows`` rows, computed one by one if they are at most ``most``."""
    import torch

    width = int(layers[0].model.config.hidden_size)
    random = torch.Generator("cuda").manual_seed(rows)
    inputs = [torch.randn((rows, 1, width), generator=random, device="cuda").half() for _ in range(INPUTS)]

    def call(number: int) -> None:
        # The fused function adds to its inputs in place, but they stay nearly the same.
        layers[number % len(layers)].forward(inputs[number % INPUTS])

    times = []
    with mock.patch.object(mixture, "ROW_BY_ROW", most), torch.inference_mode():
        for number in range(WARM):
            call(number)
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for number in range(CALLS):
                call(number)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1000 / CALLS)
    return statistics.median(times)


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    from model_worker.engines.exllamav2.load import load  # imports torch

    spec = spec_of(entry(arguments, QUICK if arguments.quick else MODEL, 64, 64 * 256, 1024))
    loaded = load(check(spec), lambda *_: None)
    layers = [module for module in loaded.model.modules if hasattr(module, "num_experts")]
    results, quicker, lost = [], 0, False
    for rows in ROWS:
        one_by_one, in_torch = milliseconds(layers, rows, max(ROWS)), milliseconds(layers, rows, 1)
        results.append(report.Result(f"{rows} rows: row by row", round(one_by_one, 4), "ms/layer"))
        if rows == 1:
            continue  # one row is fused either way
        chosen, other = (one_by_one, in_torch) if rows <= mixture.ROW_BY_ROW else (in_torch, one_by_one)
        lost = lost or one_by_one > in_torch
        quicker = quicker if lost else rows
        results += [
            report.Result(f"{rows} rows: PyTorch code", round(in_torch, 4), "ms/layer"),
            report.Result(f"{rows} rows: the way in use over the other", round(chosen / other, 3), "ratio", "<= 1"),
        ]
    results.append(report.Result("row by row is quicker up to", quicker, "rows"))
    report.write("mixture", results, arguments.out)


if __name__ == "__main__":
    main()
