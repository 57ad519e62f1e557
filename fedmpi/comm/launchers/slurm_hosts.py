"""Slurm's host lists, and the network between two hosts."""

from __future__ import annotations

import fcntl
import re
import socket
import struct

from fedmpi.common.errors import UserError

SIOCGIFADDR = 0x8915  # "address of this interface", linux/sockios.h


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


def resolve(host: str, source: str) -> str:
    """The IPv4 address of `host`, a name found in `source`. Raises UserError if there is none."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UserError(
            f"host name {host!r} (rank 0's, from {source}) does not resolve on {socket.gethostname()}: {error}.\n"
            f"Add it to DNS or /etc/hosts of all nodes, or run on one node."
        ) from error


def interface_towards(host: str) -> str | None:
    """The network interface whose address this host uses towards `host`; None if it cannot be found.

    Connecting a datagram socket sends nothing: it only asks the routing table.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        here = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == here:
                return name
    return None
