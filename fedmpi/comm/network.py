"""The network interfaces of this host: their addresses, and which of them leads to another host."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from fedmpi.common.errors import UserError

# Requests of linux/sockios.h and a flag of linux/if.h.
SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP = 0x8913, 0x8915, 1
# Bridges of containers and virtual machines, which have the same address on every host: they are offered last.
BRIDGES = ("docker*", "br-*", "virbr*", "cni*", "podman*", "lxc*")


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface; "" where it has none or is down."""
    result = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                is_up = struct.unpack_from("H", ask(SIOCGIFFLAGS, name), 16)[0] & IFF_UP
                result[name] = socket.inet_ntoa(ask(SIOCGIFADDR, name)[20:24]) if is_up else ""
            except OSError:
                result[name] = ""
    return result


def describe() -> str:
    """Return the interfaces of this host with their addresses, for a message."""
    return ", ".join(f"{name} ({address or 'no IPv4 address'})" for name, address in addresses().items()) or "none"


def outward_addresses() -> list[str]:
    """Return the addresses of this host at which other hosts may reach it, bridges of containers last."""
    outward = [(name, address) for name, address in addresses().items() if address and not is_loopback(address)]
    return [address for name, address in sorted(outward, key=lambda item: _matches(item[0], BRIDGES))]


def identity() -> str:
    """Return a text that processes have in common if they share a network stack, and thus addresses and interfaces.

    Host names do not tell: different hosts may have the same one, and containers of one host different networks.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host that uses it, whichever that is; "" is none, which leads nowhere else."""
    return address.startswith("127.") or address in ("", "::1", "localhost")


def resolve(host: str) -> str:
    """Return the IPv4 address of a host; "" if its name does not resolve."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):  # a label that is empty or too long
        return ""


def is_own(address: str) -> bool:
    """Whether this host has this address, on any interface."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        return True
    except (OSError, UnicodeError):
        return False


def address_towards(host: str) -> str:
    """Return the address that this host uses towards `host`; "" if there is no way.

    Connecting a datagram socket sends nothing: it only asks the routing table.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except (OSError, UnicodeError):
            return ""
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the network interface whose address this host uses towards `host`; None if it cannot be found."""
    here = address_towards(host)
    return next((name for name, address in addresses().items() if here and address == here), None)


def choose(interface: str | Sequence[str]) -> tuple[str, str]:
    """Return name and address of the first interface of this host that comm.interface names.

    interface: names or patterns such as ib*, the preferred ones first. Hosts may have interfaces of different names.

    Raises UserError if none of them has an address.
    """
    wanted = [interface] if isinstance(interface, str) else list(interface)
    here = addresses()
    matching = [name for pattern in wanted for name in here if _matches(name, [pattern])]
    for name in matching:
        if here[name]:
            return name, here[name]
    shown = wanted[0] if len(wanted) == 1 else f"[{', '.join(wanted)}]"
    problem = (
        f"{matching[0]} of host {socket.gethostname()} is down or has no IPv4 address"
        if matching
        else f"host {socket.gethostname()} has no such network interface"
    )
    raise UserError(f"comm.interface: {shown}: {problem}. It has {describe()}; name one that leads to the other hosts.")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
