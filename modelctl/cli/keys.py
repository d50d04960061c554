"""The command keys: manage the keys of clients. It changes files. A running supervisor sees the changes."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import F, as_json, find_config, show, watch
from modelctl.cli.root import CommandFailure, CommandGroup, command, need, say
from modelctl.cli.tables import Column, table, terminal_width
from protocol.process.paths import default_runtime_dir

if TYPE_CHECKING:
    from supervisor.config.file import Config
    from supervisor.keys.store import KeyStore

COLUMNS = (
    Column("NAME"), Column("RIGHTS"), Column("MODELS", drop=1, least=16), Column("IN FLIGHT", drop=4),
    Column("REQ/MIN", drop=7), Column("TOKENS/MIN", drop=3), Column("TOKENS/DAY", drop=3), Column("KEEP ALIVE", drop=5),
    Column("CREATED", drop=6), Column("EXPIRES", drop=2), Column("KEY", drop=8),
)  # fmt: skip


def _file(config: Path | None) -> Path:
    """Return the models.yaml whose keys are meant: a supervisor that runs shall see the change. Raises ConfigError."""
    return find_config(config, default_runtime_dir(), running_first=True)


def _store(context: click.Context, option: click.Parameter, given: Path | None) -> "KeyStore":
    """Return the store of --keys, else that of ``_file``, else the default store."""
    from supervisor.config.yaml_source import ConfigError
    from supervisor.keys.store import KeyStore, default_keys_dir

    if given is not None:
        need("--keys", given.absolute())
        return KeyStore(given.absolute())
    config: Path | None = context.params.get("config")
    if config is not None:
        need("--config", config.absolute())
    try:
        found = _file(config)
        if config is None and not found.exists():
            return KeyStore(default_keys_dir())
    except ConfigError:  # there is none
        return KeyStore(default_keys_dir())
    from supervisor.config.file import load_config

    try:
        return KeyStore(load_config(found).keys_dir)
    except ConfigError as e:
        message = "name the keys' directory with --keys, or put that right"
        raise CommandFailure(exit_codes.CONFIG, "not_usable", *map(str, e.problems), message) from None


_config_option = click.option(
    "-c", "--config", type=click.Path(path_type=Path), is_eager=True, expose_value=True, default=None,
    help="The models.yaml whose supervisor.keys is meant.  [default: $MODELCTL_CONFIG, that of the running supervisor, "
    "else as for `serve`]",
)  # fmt: skip
_keys_option = click.option(
    "--keys", "store", type=click.Path(path_type=Path, file_okay=False), default=None, callback=_store,
    help="Directory of the keys.  [default: supervisor.keys of models.yaml, $MODELCTL_KEYS, ~/.config/modelctl/keys]",
)  # fmt: skip


@click.group(cls=CommandGroup)
def keys() -> None:
    """Make, change, list and revoke keys: of clients on other machines, and of clients over HTTP.

    A running supervisor sees changes at once.
    """


_RATE = "  [default: no limit]"
_MODELS_HELP = "Names of models, or patterns such as qwen*; several with commas.  [default: all]"
_LIMITS = {
    "rights": ("--rights", "Of infer, status, admin, gateway; several with commas."),
    "models": ("--models", _MODELS_HELP),
    "expires": ("--expires", "12h, 30d or 8w from now, or a time such as 2026-01-31T12:00:00Z.  [default: never]"),
    "max_in_flight": ("--max-in-flight", f"Most requests that may be unfinished.{_RATE}"),
    "requests_per_minute": ("--requests-per-minute", f"Most requests in a minute.{_RATE}"),
    "tokens_per_minute": ("--tokens-per-minute", f"Of prompts and answers together.{_RATE}"),
    "tokens_per_day": ("--tokens-per-day", f"Of prompts and answers together.{_RATE}"),
    "keep_alive_s": ("--keep-alive", "Longest keep_alive or ttl that its requests may set: 90s, 2h.  [default: none]"),
}
"""Field of ``Identity`` → its option, and the option's help."""
_METAVARS = {"expires": "TIME", "keep_alive_s": "TIME", "rights": "TEXT", "models": "TEXT"}
NO_LIMIT = "none"
"""Takes a limit away, with ``keys set``."""


def _limit_options(command: F) -> F:
    for field, (option, text) in reversed(_LIMITS.items()):
        command = click.option(option, field, metavar=_METAVARS.get(field, "NUMBER"), help=text)(command)
    return command


def _parsed(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of the limits that are given. Raises BadParameter, which names the option."""
    from supervisor.keys.records import LIMITS, KeysProblem
    from supervisor.keys.rules import read_fields

    texts = {field: text for field, text in given.items() if text is not None}
    numbers = LIMITS.keys() - {"keep_alive_s"}
    try:
        return read_fields({field: _value(text, field in numbers) for field, text in texts.items()}, time.time())
    except KeysProblem as e:
        raise click.BadParameter(str(e), param_hint=_LIMITS[e.field or "rights"][0]) from None


def _value(text: str, is_number: bool) -> str | int | None:
    if text == NO_LIMIT:
        return None
    return int(text) if is_number and text.isascii() and text.isdecimal() else text


@command(
    ("modelctl keys new laptop", "Make a key that may send requests"),
    ("modelctl keys new ops --rights status,admin", "Make a key for an operator"),
    ("modelctl keys new web --http --models 'letters,qwen*' --expires 30d", "Make a token for a client over HTTP"),
    of=keys,
)
@click.argument("name")
@click.option("--http", is_flag=True, help="Make a token for HTTP, and show it once. There is no key file.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Admit the token in this file over HTTP, and make none. The file must be your own, with mode 0600.",
)
@_limit_options
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The key file.  [default: ./NAME.key]")
@_config_option
@_keys_option
@as_json
def new(
    name: str,
    http: bool,
    token_file: Path | None,
    out: Path | None,
    config: Path | None,
    store: "KeyStore",
    as_json: bool,
    **given: str | None,
) -> None:
    """Make a key for client NAME. Its secret is written to the key file, once, and kept nowhere else.

    Without --rights, a key may send requests (infer).
    """
    from supervisor.keys.records import KeysProblem, check_name
    from supervisor.keys.store import read_token

    check_name(name)
    examined = _examined(config) if given["models"] is not None or http or token_file is not None else None
    if given["models"] is not None:
        _check_models(given["models"], examined, store)
    limits = _parsed({"rights": "infer", **{field: text for field, text in given.items() if text is not None}})
    rights = limits.pop("rights")
    words = ",".join(sorted(rights))
    if http or token_file is not None:
        if out is not None:
            raise KeysProblem("--out is for key files, and a token has none: leave it out, and copy what is printed")
        known = None if token_file is None else read_token(token_file)
        token = store.add_token(name, rights, given=known, **limits)
        url = _gateway_url(examined)
        if as_json:
            made = {"token": token} if known is None else {}
            click.echo(json.dumps({"name": name, **made, "url": url}, indent=2))
            return
        click.echo(f"{name}: is on the list in {store.directory}, with the rights {words}")
        if known is None:
            click.echo("The token is nowhere else, and is not shown again. Move it to the client by a safe way:")
            click.echo(token)
        if url is not None:
            shown = "$(cat FILE)" if known is not None else token
            click.echo(f'try: curl {url}/v1/models -H "Authorization: Bearer {shown}"')
        return
    file = out or Path(f"{name}.key")
    key = store.add(name, rights, file, **limits)
    if as_json:
        fields = {
            "name": name,
            "file": str(file.absolute()),
            "public_key": key.public_key,
            "server_key": key.server_key,
        }
        click.echo(json.dumps(fields, indent=2))
        return
    click.echo(f"{name}: is on the list in {store.directory}, with the rights {words}")
    click.echo(f"{file}: the key, mode 0600. Its secret is nowhere else: move the file to the client by a safe way")


def _examined(config: Path | None) -> "tuple[Path, Config] | None":
    """Return the models.yaml of ``_file`` and its content; None if there is none that can be used."""
    from supervisor.config.file import load_config
    from supervisor.config.yaml_source import ConfigError

    try:
        file = _file(config)
        return file, load_config(file)
    except ConfigError:
        return None


def _check_models(text: str, examined: "tuple[Path, Config] | None", store: "KeyStore") -> None:
    """Raise KeysProblem for other names of models, and warn of unknown names, as ``keys.rules`` says.

    text      the value of --models
    examined  the result of ``_examined``
    store     the place of the key. Its models.yaml is not known if --keys names another place
    """
    from supervisor.keys.rules import check_models

    if examined is None:
        return
    file, loaded = examined
    if loaded.keys_dir.absolute() != store.directory.absolute():
        return
    for sentence in check_models([part.strip() for part in text.split(",")], loaded.models, loaded.names, file):
        say(f"modelctl: {sentence}")


def _gateway_url(examined: "tuple[Path, Config] | None") -> str | None:
    """Return the address of HTTP in the result of ``_examined``; None if it opens no port."""
    from supervisor.config.report import url_here

    gateway = None if examined is None else examined[1].gateway
    if gateway is None:
        return None
    return url_here({"listen": gateway.listen, "tls": gateway.certificate is not None})


@command(
    ("modelctl keys set guest --tokens-per-day 50000", "Change a limit"),
    ("modelctl keys set guest --expires none --models 'qwen*'", "Take a limit away, and change another one"),
    of=keys,
    name="set",
)
@click.argument("name")
@_limit_options
@_config_option
@_keys_option
@as_json
def set_(name: str, config: Path | None, store: "KeyStore", as_json: bool, **given: str | None) -> None:
    """Change rights and limits of the key of client NAME. `none` takes a limit away.

    Options that are not given stay as they are. Requests that were accepted before go on.
    """
    changes = _parsed(given)
    if not changes:
        options = ", ".join(option for option, _ in _LIMITS.values())
        raise click.UsageError(f"nothing to change: give one of {options}")
    if changes.get("models") is not None:
        _check_models(given["models"] or "", _examined(config), store)
    entry = store.change(name, changes)
    click.echo(json.dumps(entry, indent=2) if as_json else keys_text([entry], terminal_width()))


@command(("modelctl keys list", "List the keys and their rights"), of=keys, name="list")
@_config_option
@_keys_option
@watch
@as_json
def list_(config: Path | None, store: "KeyStore", watch: bool, as_json: bool) -> None:
    """List the keys that are admitted."""
    show(store.entries, keys_text, as_json=as_json, again=watch)


def keys_text(entries: Sequence[dict[str, Any]], width: int | None) -> str:
    """Return the table of the keys.

    width  columns of the terminal; None: all columns
    """
    return table(COLUMNS, [_row(entry) for entry in entries], width)


@command(("modelctl keys revoke laptop", "Admit a key no more"), of=keys)
@click.argument("name")
@_config_option
@_keys_option
@as_json
def revoke(name: str, config: Path | None, store: "KeyStore", as_json: bool) -> None:
    """Remove the key of client NAME from the list, and end its requests and connections."""
    store.revoke(name)
    click.echo(json.dumps({"revoked": name}) if as_json else f"key {name!r} is revoked")


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    models, keep_alive = entry.get("models"), entry.get("keep_alive_s")
    return (
        entry["name"], ",".join(entry["rights"]), None if models is None else ",".join(models),
        entry.get("max_in_flight"), entry.get("requests_per_minute"), entry.get("tokens_per_minute"),
        entry.get("tokens_per_day"), None if keep_alive is None else f"{keep_alive} s",
        entry["created"], entry.get("expires"), entry.get("public_key", "HTTP token"),
    )  # fmt: skip
