"""The commands sleep and wake."""

from pathlib import Path

import click

from supervisor.cli import chosen_models
from supervisor.cli.command import Command
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.orders import give_order, see_up, watch
from supervisor.cli.waiting import goes_on, settled_asleep, words_for

_no_wait = click.option("--no-wait", is_flag=True, help="Give the order and return at once.")


@click.command(
    cls=Command,
    examples={
        "modelctl sleep llama-8b": "Give the GPU memory of a model back; the next request wakes it",
    },
)
@chosen_models.named
@_no_wait
@as_json
@supervisor_options
def sleep(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Put each lazy MODEL to sleep in host memory; a pattern such as 'llama-*' needs quotes.

    A model that answers requests goes to sleep as soon as it has none.
    """
    with connect(runtime_dir, admin=True) as client:
        names = chosen_models.ordered(client, models)
        with goes_on(f"{words_for(names)} will still go to sleep: `modelctl ps` shows it"):
            workers = give_order(client, "sleep", names)
            watch(client, list(workers), settled_asleep, no_wait, as_json)


@click.command(
    cls=Command,
    examples={
        "modelctl wake llama-8b": "Wake a model before its next request comes",
    },
)
@chosen_models.named
@_no_wait
@as_json
@supervisor_options
def wake(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Wake each MODEL that sleeps; a pattern such as 'llama-*' needs quotes."""
    with connect(runtime_dir, admin=True) as client:
        names = chosen_models.ordered(client, models)
        with goes_on(f"the waking of {words_for(names)} goes on: `modelctl ps` shows it"):
            workers = give_order(client, "wake", names)
            see_up(client, {name: worker["generation"] for name, worker in workers.items()}, no_wait, as_json)
