"""``python -m tools.docs``: see ``tools.docs.pages``."""

import sys

from tools.docs import client_methods

if __name__ == "__main__":
    if "--check" not in sys.argv:
        client_methods.write()
    from tools.docs.pages import main

    sys.exit(main(sys.argv[1:]))
