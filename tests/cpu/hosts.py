"""Hosts for tests: network namespaces of this machine, each with an address and a host name of its own.

What runs on two of them reaches each other by TCP alone: sockets that pass descriptors, and with them shared memory,
end at a namespace's border.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Everything of a process but the files is its host's own, and ends with the first process of the host.
_ENTER = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


@dataclass(frozen=True)
class Host:
    """One host: the name of its namespace, its host name, its address, and the interface that has it."""

    namespace: str
    name: str
    address: str
    interface: str

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on the host; its output goes to ``log``."""
        enter = ["ip", "netns", "exec", self.namespace, *_ENTER, "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        own = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **environment}
        with log.open("wb") as out:
            return subprocess.Popen([*enter, *command], stdout=out, stderr=subprocess.STDOUT, env=own)

    def unplug(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        _run("ip", "-n", self.namespace, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a cable.

    Raises:
        RuntimeError: this machine does not allow it; the words say why.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        raise RuntimeError("ip (iproute2) and unshare (util-linux) are needed")
    tag = f"{os.getpid() % 100000:05d}"
    hosts = [Host(f"tide-{tag}-{i}", f"host{i}", f"10.213.7.{i + 1}", f"td{tag}v{i}") for i in range(2)]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        ends = [h.interface for h in hosts]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host in hosts:
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in (host.interface, "lo"):
                _run("ip", "-n", host.namespace, "link", "set", interface, "up")
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe")
            if hosts[0].start(["hostname"], probe).wait(30) != 0 or probe.read_text().strip() != hosts[0].name:
                raise RuntimeError(f"namespaces for names and processes: {probe.read_text().strip()}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False, timeout=30)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
