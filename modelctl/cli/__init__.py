"""The ``modelctl`` command. This module imports nothing at module level, because spawned workers import it again as
``__main__``."""


def main() -> int:
    """Run the command line. Return the exit code (see ``modelctl.cli.exit_codes``)."""
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
    try:
        from modelctl.cli.root import run

        return run()
    except KeyboardInterrupt:  # outside of run: during the import, or at the end
        return 130


def _clashing_distribution() -> str | None:
    """Return the path of an installed distribution named ``supervisor``, or None.

    The function reads directory names, because importing importlib.metadata takes a fifth of a command's time.
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
