"""The network interface of each back end: the one of comm.interface, or for gloo one that leads to the other hosts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from fedmpi.comm import network
from fedmpi.common.errors import RankWarning

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
OPEN_MPI = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
LOOPBACK = "lo"  # Linux's name for it


def set_interface(name: str, env: MutableMapping[str, str]) -> None:
    """Give the back ends a network interface, by the environment variables that they read when they start.

    Open MPI tries each address of a host, also one that is on every host (a bridge of containers), and may wait for
    ever for an answer. It refuses to start if both of its options are set; what the user has set stays.
    """
    env[GLOO], env[NCCL] = name, f"={name}"  # "=": not the names that begin so
    if not any(option in env for option in OPEN_MPI):
        env[OPEN_MPI[0]] = name


def check_interface(rank: int, cards: Sequence[Mapping[str, Any]], rank_0: str) -> None:
    """Warn if comm.interface of this rank is not the interface that leads to the other hosts.

    The messages may come through all the same, as some of the others can be reached over another one.

    Args:
        rank: of this process.
        cards: as `choose_interface` takes them, and "interface": the address of comm.interface, "" without one.
        rank_0: the address at which this rank has reached rank 0's store.
    """
    mine = cards[rank]
    name = next((name for name, address in network.addresses().items() if address == mine["interface"] != ""), None)
    if name is None:
        return
    for other, card in enumerate(cards):
        address = card["interface"] or (card["address"] if other else rank_0)
        if card["network"] != mine["network"] and network.interface_towards(address) not in (name, None):
            text = (
                f"comm.interface: {name} ({mine['interface']}) of host {mine['host']} is not the interface that leads "
                f"to rank {other} on {card['host']} ({address}); it may not be used. Name interfaces of one network "
                "on all hosts (fedmpi doctor lists them)"
            )
            warnings.warn(RankWarning(text), stacklevel=2)
            return


def choose_interface(rank: int, cards: Sequence[Mapping[str, Any]], rank_0: str) -> None:
    """Choose gloo's network interface by GLOO_SOCKET_IFNAME, unless comm.interface or the user has set it.

    Without it gloo binds to the address of the host's own name, or to the loopback interface if the name does not
    resolve. That is left alone where other hosts can reach the address. If they cannot, as with the 127.0.1.1 of
    Debian's /etc/hosts, gloo is given the interface over which the ranks have reached rank 0's store; and the loopback
    interface if all ranks are on one host.

    Args:
        rank: of this process.
        cards: "host", "network" and "address" of each rank: its host's name, its network namespace, and the address
            from which it has reached rank 0's store.
        rank_0: the address at which this rank has reached the store.
    """
    if GLOO in os.environ:
        return
    mine = cards[rank]
    others = [card for card in cards if card["network"] != mine["network"]]
    if not others:
        if LOOPBACK in network.addresses():
            os.environ[GLOO] = LOOPBACK
        return
    own = network.resolve(mine["host"])
    if not network.is_loopback(own) and network.is_own(own):
        return
    elsewhere = rank_0 if cards[0] in others else others[0]["address"]
    interface = network.interface_towards(elsewhere)
    if interface:
        os.environ[GLOO] = interface
