"""Make the README's table of figures from ``benchmarks/results/*.json``, so that no figure becomes stale."""

from dataclasses import dataclass

from tools.docs.markdown import table
from tools.docs.performance import ResultFile, result_files, target_text, verdict


@dataclass(frozen=True)
class Headline:
    """One row of the table.

    says    the meaning of the figure, for a reader who does not know the benchmark
    file    the result file
    result  the name of the figure in the file
    form    the format of the value
    unit    text behind the value and behind the bound of the target
    """

    says: str
    file: str
    result: str
    form: str = "{:.0f}"
    unit: str = ""


HEADLINES = (
    Headline(
        "ExLlamaV2, 1B, 32 requests at once: tokens per second with captured steps, over `graphs: false`",
        "decoding", "1b, 32 streams: graphs over graphs: false", "{:.1f}", " times",
    ),
    Headline(
        "ExLlamaV2, 8B, 32 requests at once: tokens per second, over the package's own generator without a server",
        "serving-exllamav2", "8b, 32 streams: served over bare", "{:.2f}", " times",
    ),
    Headline(
        "ExLlamaV2 on a machine without flash-attn, 32 requests at once: over the package's own fallback",
        "unpaged", "served over paged=False", "{:.0f}", " times",
    ),
    Headline(
        "events through the supervisor for one client with 16 streams, over two sockets without a router",
        "router", "one client of 16 streams, over raw messages", "{:.2f}", " times",
    ),
    Headline(
        "death of a worker that has torch loaded, until the supervisor sees it, median",
        "deaths", "embedded engine: seen after, median", "{:.0f}", " ms",
    ),
    Headline(
        "random faults against real processes, 2,500 episodes: broken promises",
        "chaos", "violations of the invariants",
    ),
)  # fmt: skip


def readme_figures() -> str:
    """Return the table of README.md."""
    return figures(result_files())


def figures(files: dict[str, ResultFile]) -> str:
    """Return the table, and a sentence that counts the targets. Raises KeyError if a file has lost a figure."""
    rows = [_row(files[headline.file], headline) for headline in HEADLINES]
    verdicts = [result["meets"] for file in files.values() for result in file.results if result["target"]]
    count = f"{len(verdicts)} figures have a target, and {verdicts.count(False)} miss it."
    return f"{table(('figure', 'measured', 'target', '', 'machine'), rows)}\n\n{count}"


def _row(file: ResultFile, headline: Headline) -> tuple[str, str, str, str, str]:
    (result,) = (result for result in file.results if result["name"] == headline.result)
    target = target_text(result["target"]) + headline.unit
    value = headline.form.format(float(result["value"])) + headline.unit
    machine = file.content["machine"].partition(", Python")[0].replace("(R)", "")
    return headline.says, value, target, verdict(result["meets"]), machine
