"""Simulate several hosts on one machine, each with its own network interfaces, host name and /etc/hosts.

A host is a sleeping process with its own namespaces (network, mounts, host name), in which `nsenter` starts other
processes. A bridge in another network namespace connects the hosts; the machine's own network is not changed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NETWORKS = {"net0": "10.77.0", "fast0": "10.78.0"}  # interface of each host -> first three numbers of its address
NEEDED = ("ip", "unshare", "nsenter", "mount", "hostname")


class UnavailableError(Exception):
    """Namespaces cannot be created on this machine or by this user."""


class SimulatedHosts:
    """A context manager that creates simulated hosts, which are numbered from 0.

    Host i has the address 10.77.0.(i+1) on its interface net0, and 10.78.0.(i+1) on fast0.

    Args:
        folder: folder for temporary files.
        names: the host names.
        hosts_files: the content of each host's /etc/hosts.

    Raises:
        UnavailableError: on entry, if namespaces cannot be created.
    """

    def __init__(self, folder: Path, names: Sequence[str], hosts_files: Sequence[str]) -> None:
        self.folder, self.names, self.hosts_files = folder, names, hosts_files
        self.sleepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SimulatedHosts:
        if missing := [name for name in NEEDED if not shutil.which(name)]:
            raise UnavailableError(f"no {missing[0]} on PATH")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for sleeper in self.sleepers:
            sleeper.kill()
            sleeper.wait()

    def _make(self) -> None:
        bridge = self._sleeper()
        self._ip(bridge, "link add switch type bridge", "link set switch up")
        for i, (name, text) in enumerate(zip(self.names, self.hosts_files, strict=True), start=1):
            host = self._sleeper()
            (self.folder / f"hosts-{i}").write_text(text)
            self._enter(host, "hostname", name)
            self._enter(host, "mount", "--bind", str(self.folder / f"hosts-{i}"), "/etc/hosts")
            self._ip(host, "link set lo up")
            for interface, net in NETWORKS.items():
                end = f"{interface}-{i}"
                self._ip(bridge, f"link add {end} type veth peer name {interface} netns {host.pid}")
                self._ip(bridge, f"link set {end} master switch", f"link set {end} up")
                self._ip(host, f"address add {net}.{i}/24 dev {interface}", f"link set {interface} up")

    def _sleeper(self) -> subprocess.Popen[bytes]:
        words = ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo; exec sleep infinity"]
        sleeper = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.sleepers.append(sleeper)
        assert sleeper.stdout is not None
        if not sleeper.stdout.readline():
            raise UnavailableError("namespaces cannot be made here")
        return sleeper

    def _ip(self, host: subprocess.Popen[bytes], *commands: str) -> None:
        for command in commands:
            self._enter(host, "ip", *command.split())

    def _enter(self, host: subprocess.Popen[bytes], *words: str) -> None:
        done = subprocess.run([*_entering(host), *words], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(f"{' '.join(words)}: {done.stderr.strip()}")

    def words(self, host: int) -> list[str]:
        """Return the words before a command that start it on a host."""
        return _entering(self.sleepers[host + 1])

    def start(self, host: int, *command: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host; its output is a pipe."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*self.words(host), *map(str, command)], **pipes | options)

    def add_bridges(self) -> None:
        """Give each host a bridge with the same address, as Docker does."""
        for host in self.sleepers[1:]:
            self._ip(
                host, "link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"
            )

    def sent_bytes(self, host: int, interface: str) -> int:
        """Return the number of bytes that a host has sent over an interface."""
        command = [*self.words(host), "cat", "/proc/self/net/dev"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:")

    def agent(self) -> Path:
        """Return a program for mpirun in place of ssh: it starts a command on the host of a name."""
        path = self.folder / "agent"
        cases = [f'{name}) exec {" ".join(self.words(i))} sh -c "$*" ;;' for i, name in enumerate(self.names)]
        path.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *cases, "esac", ""]))
        path.chmod(0o755)
        return path


def _entering(host: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "--target", str(host.pid), "--net", "--mount", "--uts", "--"]
