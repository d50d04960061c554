"""``python -m tools.docs``: see ``tools.docs.pages``."""

import sys

from tools.docs.pages import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
