"""What a worker process says by its exit code and last line: the supervisor decides by it whether to try again."""

EXIT_ASKED = 0
"""SHUTDOWN was obeyed."""
EXIT_ENGINE_FAULT = 70
"""The engine raised (EX_SOFTWARE). Tried again."""
EXIT_DISCONNECTED = 71
"""The connection to the supervisor was lost while the supervisor lives (EX_OSERR). Tried again."""
EXIT_CONFIG = 78
"""The model cannot be loaded as configured (EX_CONFIG). Never tried again by itself."""
LOAD_ERROR_PREFIX = "cannot load: "
"""The supervisor looks for this at the start of the log's last lines to say why in one line."""
