"""The text of the systemd unit that runs a supervisor. Pure.

The files deploy/systemd/*.service show what comes out. A test runs these units under a real systemd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from supervisor.cli import exit_codes
from supervisor.config_schema import StopConfig
from supervisor.gateway_process import LEAVE_S
from supervisor.placement.vram_return import DEADLINE_S

MARK: Final = "# Written by `modelctl service install`, which may write it again: put changes into a drop-in"
"""The first line of a unit. A unit without it belongs to somebody else."""
NAME: Final = "modelctl.service"
RUNTIME_DIR: Final = Path("/var/lib/modelctl/supervisor")
"""The runtime directory of a supervisor that a unit of the system runs. It is not below /run, because logs, events and
counts of usage are in it, too, and have to survive a restart of the machine."""
_CACHE: Final = "/var/cache/modelctl"
_MARGIN_S: Final = 10.0
_FINAL_CODES: Final = (exit_codes.USAGE, exit_codes.TEMPFAIL, exit_codes.CONFIG)


class Scope(StrEnum):
    SYSTEM = "system"
    """Started with the machine, for a user that the unit names."""
    USER = "user"
    """Started by the service manager of one user."""


@dataclass(frozen=True)
class Unit:
    """What differs between units.

    command  the words that call modelctl, with absolute paths
    config   models.yaml, an absolute path
    run_as   the user of a unit of the system
    stop     the section supervisor.stop of models.yaml
    """

    scope: Scope
    command: Sequence[str]
    config: Path
    stop: StopConfig
    run_as: str = ""

    @property
    def stop_s(self) -> int:
        """Seconds for a whole shutdown: the drain, the stop ladder, the return of GPU memory, and the gateway."""
        return round(self.stop.drain + self.stop.shutdown + self.stop.sigterm + DEADLINE_S + LEAVE_S + _MARGIN_S)

    def text(self) -> str:
        """Return the unit file."""
        command = " ".join(map(quoted, self.command))
        system = self.scope is Scope.SYSTEM
        return "\n".join(
            [
                MARK,
                *_HEAD.format(
                    after="After=network.target remote-fs.target nvidia-persistenced.service\n" if system else ""
                ).splitlines(),
                *(_PLACES.format(user=self.run_as, runtime=RUNTIME_DIR, cache=_CACHE).splitlines() if system else []),
                f"ExecStart={command} serve {quoted(str(self.config))}",
                f"ExecReload={command} reload",
                *_LIFE.format(
                    codes=" ".join(map(str, _FINAL_CODES)), codes_in_words=_in_words(), stop=self.stop_s
                ).splitlines(),
                *_LOCKS.splitlines(),
                *(_SYSTEM_LOCKS.splitlines() if system else []),
                "",
                "[Install]",
                f"WantedBy={'multi-user' if system else 'default'}.target",
                "",
            ]
        )


def quoted(word: str) -> str:
    """Return a word for a command line of a unit. Raises ValueError for a line break, which a unit cannot hold."""
    if "\n" in word or "\r" in word:
        raise ValueError(f"{word!r} has a line break, which a systemd unit cannot hold: rename it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = all(c.isalnum() or c in "/._-+:@,=~%$" for c in escaped)
    return escaped if plain and escaped else f'"{escaped}"'


def _in_words() -> str:
    meaning = {exit_codes.USAGE: "wrong options", exit_codes.TEMPFAIL: "another supervisor runs there",
               exit_codes.CONFIG: "models.yaml or the environment is not usable"}  # fmt: skip
    return "\n".join(f"# {code}: {meaning[code]}" for code in _FINAL_CODES)


_HEAD = """\

[Unit]
Description=modelctl, which serves language models
{after}StartLimitIntervalSec=5min
StartLimitBurst=5

[Service]
# Ready when each model that starts with the supervisor is ready or has failed for good.
Type=notify
NotifyAccess=main"""

_PLACES = """\
User={user}
# Sockets, logs, events and counts of usage.
StateDirectory=modelctl
StateDirectoryMode=0700
Environment=MODELCTL_RUNTIME_DIR={runtime}
# ExLlamaV2's CUDA code is compiled into here at the first start.
CacheDirectory=modelctl
CacheDirectoryMode=0700
Environment=XDG_CACHE_HOME={cache} TRITON_CACHE_DIR={cache}/triton CUDA_CACHE_PATH={cache}/cuda
# As root: load the driver's modules and make the device files of the GPUs, if nothing has done that before.
ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u"""

_LIFE = """\
# The time to compile. From then on the supervisor extends the time itself, for as long as its loop is alive.
TimeoutStartSec=15min
# A supervisor whose loop is stopped or stuck gets SIGABRT, writes its stack to the journal, and then gets SIGKILL.
WatchdogSec=30
TimeoutAbortSec=10
# Only the supervisor gets SIGTERM. It lets requests finish, and ends the workers itself.
KillMode=mixed
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=2
# A restart does not help with these exit codes.
{codes_in_words}
RestartPreventExitStatus={codes}
# A worker that the kernel ends for want of memory is the supervisor's business: the other models go on.
OOMPolicy=continue
LimitNOFILE=65536
"""

_LOCKS = """\
# Not set, because they keep CUDA from working: MemoryDenyWriteExecute, and PrivateDevices, DevicePolicy and
# ProtectClock, which hide the GPUs. PrivateUsers would hide who a client is.
NoNewPrivileges=yes
UMask=0077
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
# What containers are not allowed either, and CUDA runs in containers.
SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM"""

_SYSTEM_LOCKS = """\
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
KeyringMode=private"""
