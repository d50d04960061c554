"""The group of all commands. The module of a command is imported when the command is called, which saves time."""

import importlib
import sys

import click

from protocol import __version__
from protocol.process.core_dumps import forbid_core_dumps
from supervisor.cli import colours, exit_codes
from supervisor.cli.command_group import CommandGroup
from supervisor.cli.errors import report
from supervisor.cli.streams import drop_unwritten, open_missing, take_streams
from supervisor.compiled_modules import loss

_COMMANDS = {
    "init": "supervisor.cli.init:init",
    "serve": "supervisor.cli.serve:serve",
    "start": "supervisor.cli.orders:start",
    "stop": "supervisor.cli.orders:stop",
    "unload": "supervisor.cli.orders:unload",
    "restart": "supervisor.cli.orders:restart",
    "sleep": "supervisor.cli.sleep:sleep",
    "wake": "supervisor.cli.sleep:wake",
    "reload": "supervisor.cli.reload:reload",
    "shutdown": "supervisor.cli.orders:shutdown",
    "ps": "supervisor.cli.views:ps",
    "status": "supervisor.cli.views:status",
    "top": "supervisor.cli.top:top",
    "cluster": "supervisor.cli.cluster:cluster",
    "usage": "supervisor.cli.usage:usage",
    "metrics": "supervisor.cli.metrics:metrics",
    "run": "supervisor.cli.run:run",
    "requests": "supervisor.cli.requests:requests",
    "story": "supervisor.cli.story:story",
    "cancel": "supervisor.cli.requests:cancel",
    "events": "supervisor.cli.events:events",
    "logs": "supervisor.cli.logs:logs",
    "log-level": "supervisor.cli.log_level:log_level",
    "bench": "supervisor.cli.bench:bench",
    "plan": "supervisor.cli.plan:plan",
    "check": "supervisor.cli.check:check",
    "config": "supervisor.cli.config:config",
    "quantize": "supervisor.cli.quantize:quantize",
    "doctor": "supervisor.cli.doctor.command:doctor",
    "service": "supervisor.cli.service:service",
    "keys": "supervisor.cli.keys:keys",
    "completion": "supervisor.cli.completion:completion",
    "gateway": "supervisor.cli.gateway:gateway",
}
ALIASES = {"load": "start", "ls": "ps"}


class _LazyGroup(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def names(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *ALIASES]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        target = _COMMANDS.get(ALIASES.get(name, name))
        if target is None:
            return None
        module, attribute = target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"modelctl, version {__version__}\n{loss() or 'compiled modules are in use'}")
        context.exit()


_EXIT_CODES = """\
Exit codes: 0 done, 1 a model or request failed, 2 wrong usage, 3 no room (plan), 69 no supervisor is running, 70 a
fault of modelctl, 75 another supervisor is running, 77 the key may not do that, 78 models.yaml or the environment is
not usable, 130 interrupted."""


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and whether the compiled modules are in use.",
)
def cli() -> None:
    """Serve several ExLlamaV2 models on one box: one process per model, pinned to its GPU.

    \b
    First steps:
      modelctl init ~/models     write ./models.yaml, with an entry for each model
      modelctl serve --detach    serve the models of ./models.yaml
      modelctl run NAME          ask the model NAME
      modelctl shutdown          end everything
    """


def run() -> int:
    """Run the command line. Return the exit code. An error becomes one line on stderr."""
    open_missing()
    take_streams()
    forbid_core_dumps()  # for the supervisor and its children, and for commands with a prompt or a key in memory
    try:
        code = _call()
        sys.stdout.flush()
    except BaseException as e:
        code = report(e, as_json=_json_wanted())
    drop_unwritten()
    return code


def _call() -> int:
    streams = sys.stdout, sys.stderr
    try:
        result = cli.main(standalone_mode=False, complete_var="_MODELCTL_COMPLETE", color=colours.chosen())
    except SystemExit:
        if sys.stdout is streams[0]:
            raise  # the shell's completion
        # click handles a closed pipe even with standalone_mode=False: it replaces the streams by streams that ignore
        # the error, and exits with 1.
        sys.stdout, sys.stderr = streams
        raise BrokenPipeError from None
    return result if isinstance(result, int) else exit_codes.OK


def _json_wanted() -> bool:
    """Return whether errors must be JSON. This reads sys.argv, so that it works for errors of the command line
    itself."""
    options = sys.argv[1:]
    return "--json" in (options[: options.index("--")] if "--" in options else options)
