"""The command group: commands are imported when they are called, so that each pays only for itself."""

import importlib
import sys

import click

from protocol.errors import ConnectionLost, WireError
from supervisor.cli import exit_codes

_COMMANDS = {
    "serve": "supervisor.cli.serve:serve",
    "start": "supervisor.cli.orders:start",
    "stop": "supervisor.cli.orders:stop",
    "restart": "supervisor.cli.orders:restart",
    "shutdown": "supervisor.cli.orders:shutdown",
    "ps": "supervisor.cli.views:ps",
    "status": "supervisor.cli.views:status",
    "run": "supervisor.cli.run:run",
    "logs": "supervisor.cli.logs:logs",
    "check": "supervisor.cli.check:check",
}
_ALIASES = {"load": "start", "unload": "stop", "ls": "ps"}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        target = _COMMANDS.get(_ALIASES.get(name, name))
        if target is None:
            return None
        module, attribute = target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="modelctl", prog_name="modelctl")
def cli() -> None:
    """Serve several ExLlamaV2 models on one box: one process per model, pinned to its GPU.

    \b
    Exit codes: 0 done, 1 a model or request failed, 2 wrong usage, 69 no supervisor is running,
    75 another one is, 78 models.yaml or the environment is not usable, 130 interrupted.
    """


def run() -> int:
    """Run the command line. Errors become one line on stderr and an exit code."""
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else exit_codes.OK
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except click.Abort:
        return exit_codes.INTERRUPTED
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except ConnectionLost as e:
        print(f"modelctl: {e.message}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    except WireError as e:
        print(f"modelctl: {e}", file=sys.stderr)
        return exit_codes.FAILED
    except BrokenPipeError:
        # `modelctl ps | head`: the reader has had enough. Python would complain again when it flushes at exit.
        sys.stderr.close()
        return exit_codes.OK
