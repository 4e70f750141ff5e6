"""Makes two hosts on one machine: network namespaces of Linux, each with an address and a
host name of its own, joined by a bridge to the address that the servers have. No packet
leaves the machine by it. That needs root; without it, the workers are two processes of one
host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.services.processes import SettingError

VARIABLE, USUAL = "HEADROOM_TEAM_NETWORK", "10.83.77"
PRIVATE = r"(10(\.\d{1,3}){2}|192\.168\.\d{1,3})"
RENAME_SCRIPT = 'hostname "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Hosts:
    """Network namespaces that stand for hosts, by their names."""

    network: str  # the first three numbers of its addresses
    names: Sequence[str]

    @property
    def servers(self) -> str:
        """Return the address of this side of the bridge."""
        return f"{self.network}.1"

    @property
    def table(self) -> str:
        """Return the routing table by which the servers' address reaches only the hosts."""
        return "83" + self.network.rpartition(".")[2]

    def make(self) -> str:
        """Make the hosts, where they do not exist.

        Return why they can't be made, or an empty text.
        """
        if os.geteuid():
            return "network namespaces take root"
        if lacks := [p for p in ("ip", "nsenter", "unshare", "hostname") if not shutil.which(p)]:
            return f"network namespaces take the program {lacks[0]}"
        if self.are_there():
            return ""
        self.remove()
        bridge, all_of_it = self._namespace("0"), f"{self.network}.0/24"
        lines = [
            f"link add {bridge} type bridge",
            f"addr add {self.servers}/24 dev {bridge}",
            f"link set {bridge} up",
            f"route add {all_of_it} dev {bridge} table {self.table}",
            f"route add unreachable default table {self.table}",
            f"rule add from {self.servers} lookup {self.table}",
        ]
        for number, name in enumerate(self.names, start=2):
            there, cable = self._namespace(name), f"{bridge}-{number}"
            lines += [
                f"netns add {there}",
                f"link add {cable} type veth peer name eth0 netns {there}",
                f"link set {cable} master {bridge} up",
                f"netns exec {there} ip link set lo up",
                f"netns exec {there} ip addr add {self.network}.{number}/24 dev eth0",
                f"netns exec {there} ip link set eth0 up",
            ]
        for line in lines:
            if why := _run_ip(line):
                self.remove()
                return f"network namespaces can't be made here ({why})"
        return ""

    def are_there(self) -> bool:
        """Whether `make` has made them."""
        return all(Path("/run/netns", self._namespace(name)).exists() for name in self.names)

    def remove(self) -> None:
        """Remove what `make` has made."""
        if os.geteuid() or not shutil.which("ip"):
            return
        for number, name in enumerate(self.names, start=2):
            _run_ip(f"link delete {self._namespace('0')}-{number}")  # else it goes, but later
            _run_ip(f"netns delete {self._namespace(name)}")
        _run_ip(f"link delete {self._namespace('0')}")
        _run_ip(f"rule delete from {self.servers} lookup {self.table}")
        _run_ip(f"route flush table {self.table}")

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs this one on that host."""
        there = f"--net=/run/netns/{self._namespace(name)}"
        renamed = ["unshare", "--uts", "sh", "-c", RENAME_SCRIPT, "sh", name]
        return ["nsenter", there, *renamed, *command]

    def _namespace(self, name: str) -> str:
        return f"headroom{self.network.rpartition('.')[2]}-{name}"


def plan_hosts(names: Sequence[str]) -> Hosts:
    """Return the hosts of these names, not made yet, on the network that the environment names.

    Raises SettingError where it names none that is valid.
    """
    network = os.environ.get(VARIABLE) or USUAL
    if not re.fullmatch(PRIVATE, network) or any(int(n) > 255 for n in network.split(".")):
        raise SettingError(
            f"{VARIABLE}: must be three numbers of a private network, such as {USUAL} "
            f"(got {network!r})"
        )
    return Hosts(network, names)


def _run_ip(line: str) -> str:
    """Run `ip` with these words; return its error in one line, or an empty text."""
    with suppress(OSError):
        done = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
        return (done.stderr.strip() or "refused").splitlines()[0] if done.returncode else ""
    return "no program ip"
