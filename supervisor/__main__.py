"""``python -m supervisor`` is ``modelctl``."""

from supervisor.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
