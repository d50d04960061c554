"""The ``modelctl`` command. Imports nothing here: spawned workers import this module again as their ``__main__``."""


def main() -> int:
    """Entry point of the console script. Returns the exit code (see ``supervisor.cli.exit_codes``)."""
    clash = _clashing_distribution()
    if clash is not None:
        import sys

        print(
            f"modelctl: the distribution 'supervisor' (supervisord) is installed in this environment, in {clash}. "
            "It owns the same import name 'supervisor' and overwrites files of modelctl. Uninstall it, or install "
            "modelctl into an environment of its own.",
            file=sys.stderr,
        )
        return 78
    import os

    # Plugins of pydantic are looked for among all that is installed, and run in whoever imports it. None is wanted
    # where requests and keys pass, and looking for them takes longer the more is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from supervisor.cli.root import run

        return run()
    except KeyboardInterrupt:  # outside of run: still importing, or on the way out
        return 130


def _clashing_distribution() -> str | None:
    """Where a distribution named ``supervisor`` is installed, None if it is not.

    Looks at directory names instead of importlib.metadata, whose import alone takes a fifth of a command's time.
    """
    import os
    import sys

    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("supervisor-") and name.endswith((".dist-info", ".egg-info", ".egg")):
                return os.path.join(entry, name)
    return None
