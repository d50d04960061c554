"""The command gateway: serve OpenAI's API over HTTP for a supervisor, usually one on another machine."""

import logging
import select
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.process.log_style import FORMATS, LEVELS, LogStyle
from supervisor.cli import exit_codes
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import supervisor_options, way_to

if TYPE_CHECKING:
    from supervisor.config_gateway import GatewayConfig

PATIENCE_S = 35.0
"""Seconds that answers may take to complete after the first signal. A second signal ends them at once."""


@click.command(
    cls=Command,
    examples={
        "modelctl gateway --connect tcp://192.168.1.5:5570 --key-file web.key": "Serve another machine's models",
        "modelctl gateway --listen 9000 --auth none": "Serve the models of this machine, for a try, without tokens",
    },
)
@click.option("--listen", metavar="ADDRESS:PORT", help="Address and port to listen on.  [default: 127.0.0.1:8000]")
@click.option("--auth", metavar="keys|none", help="none: requests need no token; for loopback only.  [default: keys]")
@click.option("--processes", type=int, help="Processes that share the port.  [default: 1]")
@click.option("--allowed-host", "allowed_hosts", multiple=True, help="A name by which clients may call the gateway.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="An origin of web pages that may use the API.")
@click.option("--certificate", help="PEM file of the certificate chain, for HTTPS.")
@click.option("--private-key", help="PEM file of its private key.")
@click.option("--max-body", help="Largest body of a request.  [default: 16MiB]")
@click.option("--stored-items", help="Bytes of responses' items that are kept in memory.  [default: 128MiB]")
@click.option("--keepalive", metavar="comment|chunk|off", help="What keeps silent streams open.  [default: comment]")
@click.option("--progress", metavar="comment|reasoning", help="Where chats tell of a model's load.  [default: comment]")
@click.option(
    "--reasoning-key",
    metavar="reasoning_content|reasoning",
    help="The key of the reasoning in answers.  [default: reasoning_content]",
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Least level logged.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default="human", show_default=True, help="json: an object in each line."
)
@supervisor_options
def gateway(runtime_dir: Path, log_level: str, log_format: str, **given: Any) -> int:
    """Serve OpenAI's API over HTTP in this terminal, for a supervisor that runs already.

    The supervisor on this machine needs no such command: the section `gateway` of models.yaml does the same. For one on
    another machine, give --connect and a key with the right `gateway` (`modelctl keys new NAME --rights gateway`).

    The options are the keys of the section `gateway`, and those of the log.
    """
    from protocol.client.client_key import ClientKey
    from protocol.process.engine_packages import missing_for_gateway
    from protocol.process.log_output import begin_log, never_wait
    from supervisor.gateway_process import CHECK_S, GatewayProcesses, settings_of, with_seal_secret
    from supervisor.helper import HelperWatch

    config = _config_of(given)
    style = LogStyle(log_level, log_format)
    settings = replace(settings_of(config, Path.cwd()), log_style=style)
    way = way_to(runtime_dir)
    if "key" in way:
        try:
            ClientKey.load(way["key"])
        except ValueError as e:
            raise CommandFailure(exit_codes.CONFIG, "bad_key", str(e)) from None
        settings = replace(settings, connect=str(way["endpoint"]), key_file=str(Path(way["key"]).absolute()))
    else:
        settings = with_seal_secret(replace(settings, runtime_dir=str(runtime_dir)), runtime_dir)
    if (missing := missing_for_gateway()) is not None:
        raise CommandFailure(exit_codes.CONFIG, "not_installed", missing)
    never_wait()
    begin_log("gateway", style)
    watch = HelperWatch()
    processes = GatewayProcesses(config, settings, logging.getLogger("modelctl"), watch)
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            processes.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        processes.check()
        if not processes.is_open:
            raise CommandFailure(exit_codes.CONFIG, "cannot_listen")  # the log has said why
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        while not signals:
            if poll.poll(CHECK_S * 1000):
                watch.hear()
            processes.check()
    finally:
        processes.close(PATIENCE_S)
    return exit_codes.INTERRUPTED if signals[0] == signal.SIGINT else exit_codes.OK


def _config_of(given: dict[str, Any]) -> "GatewayConfig":
    """Return the section ``gateway`` that the options stand for. Raises UsageError with the option that is wrong."""
    from protocol.values import Unfit
    from supervisor.config_gateway import GatewayConfig, gateway_problems
    from supervisor.schema_validation import fit

    names = {"allowed_hosts": "--allowed-host", "cors_origins": "--cors-origin"}
    present = {key: value for key, value in given.items() if value not in (None, ())}
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in present.items()}
    try:
        config = fit(GatewayConfig, keys)
        problems = gateway_problems(config)
    except Unfit as e:
        problems = [(str(flaw.path[0]), flaw.message) for flaw in e.flaws]
    if problems:
        key, message = problems[0]
        raise click.UsageError(f"{names.get(key, '--' + key.replace('_', '-'))}: {message}")
    return config
