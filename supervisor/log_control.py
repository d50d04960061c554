"""Have the supervisor, the gateway and the workers write their logs as ``LogStyles`` says, while they run."""

import logging

from protocol.errors import RequestError
from protocol.limits import GATEWAY_NAME, SUPERVISOR_NAME
from protocol.process.log_lines import LogLines
from protocol.process.log_style import LEVELS, LogStyle
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.gateway_process import GatewayProcesses
from supervisor.log_styles import StyledByModel
from supervisor.requests.effect_queue import EffectQueue


class LogControl:
    """The way from the styles of logs to the processes that write them."""

    def __init__(
        self, registry: ReplicaRegistry, log: logging.Logger, gateway: GatewayProcesses, effects: EffectQueue
    ) -> None:
        self._registry = registry
        self._log = log
        self._gateway = gateway
        self._effects = effects

    def adopt(self, start: LogStyle) -> None:
        """Apply what models.yaml says now."""
        self._registry.log_styles.adopt(start)
        self.apply()

    def levels(self, name: str | None, level: str | None) -> dict[str, str]:
        """Set the level of a process, or of all, and return the levels: the answer to the verb ``log_level``.

        name   a model, the supervisor or the gateway; None for all
        level  None to set nothing

        Raises RequestError for an unknown level.
        """
        if level is not None and level not in LEVELS:
            raise RequestError(f"level is {level[:64]!r}: must be one of {', '.join(LEVELS)}", field="level")
        styles, gateway = self._registry.log_styles, [GATEWAY_NAME] if self._registry.config.gateway else []
        names = [SUPERVISOR_NAME, *gateway, *self._registry.models] if name is None else [name]
        if level is not None:
            styles.set(names, level)
            self._log.info("log level of %s: %s", name or "all processes", level)
            self.apply()
        return {each: styles.of(each).level for each in names}

    def apply(self) -> None:
        """Let every process that writes otherwise follow. Call this after a change of the styles."""
        styles = self._registry.log_styles
        own = styles.of(SUPERVISOR_NAME)
        # Events are kept whatever the level is, and a model's log takes the supervisor's lines by the model's level.
        self._log.setLevel(min(logging.INFO, styles.least()))
        for handler in self._log.handlers:
            if isinstance(handler.formatter, LogLines):
                handler.formatter.as_json = own.is_json
                if isinstance(handler, StyledByModel):
                    handler.styles = styles
                else:
                    handler.setLevel(own.number)
        self._gateway.write_logs(styles.of(GATEWAY_NAME))
        self._effects.add(self._registry.log_orders(self._registry.replicas.values()))
