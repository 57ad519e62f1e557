"""List the network interfaces of this host, and choose the interface that the communication back ends use."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError

# Requests of linux/sockios.h and a flag of linux/if.h.
SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP = 0x8913, 0x8915, 1
# The environment variables that set the network interface of gloo, NCCL and Open MPI.
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
OPEN_MPI_VARIABLES = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
LOOPBACK = "lo"  # name of the loopback interface on Linux


def list_addresses() -> dict[str, str]:
    """Return {interface name: IPv4 address}; the address is "" if the interface has none or is down."""
    result = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def query_interface(request: int, name: str) -> bytes:
            return fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                is_up = struct.unpack_from("H", query_interface(SIOCGIFFLAGS, name), 16)[0] & IFF_UP
                result[name] = socket.inet_ntoa(query_interface(SIOCGIFADDR, name)[20:24]) if is_up else ""
            except OSError:
                result[name] = ""
    return result


def describe_interfaces() -> str:
    """Describe the network interfaces of this host and their addresses for a message."""
    return ", ".join(f"{name} ({address or 'no IPv4 address'})" for name, address in list_addresses().items()) or "none"


def list_external_addresses() -> list[str]:
    """Return the IPv4 addresses of this host that other hosts may be able to reach: all but loopback addresses."""
    return [address for address in list_addresses().values() if not is_loopback(address)]


def get_network_stack_id() -> str:
    """Return a string that identifies the network stack of this process: its interfaces and addresses.

    A host name is not enough: different hosts may have the same name, and containers of one host may have different
    networks.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address or empty."""
    return address.startswith("127.") or address in ("", "::1", "localhost")


def resolve_host(host: str) -> str:
    """Return the IPv4 address of a host; "" if its name does not resolve."""
    try:
        return socket.gethostbyname(host) if host else ""
    except (OSError, UnicodeError):  # UnicodeError: a label of the name is empty or too long
        return ""


def is_local_address(address: str) -> bool:
    """Return whether a network interface of this host has this address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        return True
    except (OSError, UnicodeError):
        return False


def find_interface_towards(host: str) -> str | None:
    """Return the network interface through which this host reaches `host`; None if it cannot be found.

    Connecting a datagram socket sends nothing; it only looks up the route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except (OSError, UnicodeError):
            return None
        own = probe.getsockname()[0]
    return next((name for name, address in list_addresses().items() if address == own), None)


# ---- the interface that the back ends use ----
def choose_interface(interface: str | Sequence[str]) -> tuple[str, str]:
    """Return the name and address of the first network interface of this host that matches comm.interface.

    Args:
        interface: names or patterns such as ib*, in order of preference. Several can be given, because names may differ
            between hosts.

    Raises:
        UserError: no interface with an address matches.
    """
    patterns = [interface] if isinstance(interface, str) else list(interface)
    local_addresses = list_addresses()
    for pattern in patterns:
        for name, address in local_addresses.items():
            if address and fnmatch.fnmatchcase(name, pattern):
                return name, address
    raise UserError(
        f"comm.interface: {', '.join(patterns)}: host {socket.gethostname()} has no such network interface with an "
        f"IPv4 address; it has {describe_interfaces()}; choose one that leads to the other hosts"
    )


def set_interface_variables(name: str, env: MutableMapping[str, str]) -> None:
    """Set the environment variables from which the back ends read their network interface when they start.

    Without them, Open MPI tries all addresses of a host, including those of container bridges, which are the same on
    every host, and may wait forever for an answer. Open MPI does not start if both of its variables are set; therefore
    a value that the user has set is not changed.
    """
    env[GLOO_VARIABLE], env[NCCL_VARIABLE] = name, f"={name}"  # "=": an exact name instead of a prefix
    if not any(option in env for option in OPEN_MPI_VARIABLES):
        env[OPEN_MPI_VARIABLES[0]] = name


def set_gloo_interface(rank: int, descriptions: Sequence[Mapping[str, Any]], store_address: str) -> None:
    """Set gloo's network interface (GLOO_SOCKET_IFNAME), unless comm.interface or the user has set it.

    By default, gloo binds to the address to which the host's name resolves. If other hosts cannot reach that address
    (127.0.1.1 in Debian's /etc/hosts), gloo uses the interface over which the ranks have reached rank 0's store. If all
    ranks are on one host, gloo uses the loopback interface.

    Args:
        rank: the rank of this process.
        descriptions: for each rank "host", "network" and "address": the name of its host, its network stack, and the
            address from which it has reached rank 0's store.
        store_address: the address at which this rank has reached the store.
    """
    if GLOO_VARIABLE in os.environ:
        return
    mine = descriptions[rank]
    others = [description for description in descriptions if description["network"] != mine["network"]]
    if not others:
        if LOOPBACK in list_addresses():
            os.environ[GLOO_VARIABLE] = LOOPBACK
        return
    own = resolve_host(mine["host"])
    if is_loopback(own) or not is_local_address(own):
        interface = find_interface_towards(store_address if descriptions[0] in others else others[0]["address"])
        if interface:
            os.environ[GLOO_VARIABLE] = interface
