"""The program of an agent, see ``agent``.

It is a ``__main__`` of a package because the worker that the agent spawns would import any other main module again.
"""

import sys

from supervisor.cluster.agent import main

sys.exit(main())
