"""Slurm's host lists, and the addresses of hosts in them."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from fedmpi.comm import network
from fedmpi.common.errors import UserError

ASK_S = 5.0  # for scontrol to answer


def expand(hostlist: str) -> list[str]:
    """The hosts that a Slurm host list names, in order. Raises UserError where it is malformed.

    >>> expand("a[01-03,7],b2")
    ['a01', 'a02', 'a03', 'a7', 'b2']
    """
    part = r"[^\[\],]+|\[[\d,-]+\]"  # plain text, or numbers in brackets
    if not re.fullmatch(rf"(?:{part})+(?:,(?:{part})+)*", hostlist):
        raise UserError(f"host list {hostlist!r}: expected Slurm's form, like a[01-03,7],b2.")
    hosts: list[str] = []
    for word in re.findall(rf"(?:{part})+", hostlist):
        names = [""]
        for text in re.findall(part, word):
            endings = numbers(text[1:-1]) if text.startswith("[") else [text]
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return hosts


def numbers(ranges: str) -> list[str]:
    """The numbers in a bracket; a range keeps the width of its first number.  "08-10,7" -> 08, 09, 10, 7"""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def address(host: str, source: str, env: Mapping[str, str]) -> str:
    """Return a name or an address at which other hosts reach the host `host` of a Slurm host list.

    Its name, if that resolves to an address that is not a loopback; else the address that slurm.conf gives it; else
    MASTER_ADDR, which job scripts often set.

    source: the variable that has the host list, for the message.

    Raises UserError if none of them resolves.
    """
    own = network.resolve(host)
    if own and not network.is_loopback(own):
        return own
    for other in (node_address(host, env), env.get("MASTER_ADDR", "")):
        if other and not network.is_loopback(network.resolve(other)):
            return network.resolve(other)
    if own:  # as on this host itself, in Debian's /etc/hosts
        return own
    raise UserError(
        f"host name {host!r} (rank 0's, from {source}) does not resolve on {socket.gethostname()}.\n"
        f"Add it to DNS or /etc/hosts of all nodes, export MASTER_ADDR with an address of it, or run on one node."
    )


def node_address(host: str, env: Mapping[str, str]) -> str:
    """Return NodeAddr of a node in slurm.conf; "" if Slurm does not tell."""
    command = ["scontrol", "show", "node", host, "--oneliner"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=dict(env), check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return match[1] if match else ""
