"""Exit codes and the last log line of a worker process. They decide whether the supervisor starts it again."""

EXIT_ASKED = 0
"""The supervisor asked the worker to end, or the supervisor itself is gone."""
EXIT_ENGINE_FAULT = 70
"""The engine raised an exception (EX_SOFTWARE). The supervisor starts the worker again."""
EXIT_DISCONNECTED = 71
"""The worker lost its connection while the supervisor lives (EX_OSERR). The supervisor starts the worker again."""
EXIT_AWAY = 74
"""The model's files cannot be read now, for example because their file system is away (EX_IOERR). The supervisor tries
again for as long as that lasts."""
EXIT_CONFIG = 78
"""The model cannot be loaded as configured (EX_CONFIG). The supervisor does not start the worker again by itself."""
LOAD_ERROR_PREFIX = "cannot load: "
"""Prefix of the line that a worker logs when its model cannot be loaded. The supervisor quotes that line as the
reason."""
