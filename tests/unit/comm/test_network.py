"""The network interfaces of this host, and which of them messages use."""

import os
import socket
from types import SimpleNamespace

import pytest
from helpers import ROOT

from fedmpi import config
from fedmpi.comm import Job, connect, network
from fedmpi.comm.backends import torch_dist
from fedmpi.common.errors import UserError

INTERFACES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "", "ib1": "10.1.0.5"}


@pytest.fixture
def interfaces(monkeypatch):
    monkeypatch.setattr(network, "list_addresses", lambda: dict(INTERFACES))
    monkeypatch.setattr(socket, "gethostname", lambda: "a02")


def test_the_loopback_interface_is_found():
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert network.list_addresses()[loopback] == "127.0.0.1"
    assert network.find_interface_towards("127.0.0.1") == loopback
    assert network.find_interface_towards("no-such-host.invalid") is None
    assert network.is_local_address("127.0.0.1")
    assert not network.is_local_address("192.0.2.7")  # RFC 5737: of no host
    assert (
        network.resolve_host("no-such-host.invalid") == network.resolve_host("a..b") == network.resolve_host("") == ""
    )


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [("eth0", "eth0"), ("ib*", "ib1"), (["ens3", "ib1"], "ib1"), (["ib*", "eth0"], "ib1"), (["ib0", "e*"], "eth0")],
)
def test_the_first_matching_interface_with_an_address_is_chosen(interfaces, asked, chosen):
    assert network.choose_interface(asked) == (chosen, INTERFACES[chosen])


@pytest.mark.parametrize("asked", ["ens*", ["ens3", "eth"], "ib0"])
def test_without_a_matching_interface_the_error_lists_all_interfaces(interfaces, asked):
    names = asked if isinstance(asked, str) else ", ".join(asked)
    with pytest.raises(
        UserError, match=r"host a02 has no such .*eth0 \(10\.0\.0\.5\), ib0 \(no IPv4 address\)"
    ) as caught:
        network.choose_interface(asked)
    assert str(caught.value).startswith(f"comm.interface: {names}: ")


# ---- gloo's interface ----
CARDS = [
    {"host": "node", "network": "a", "address": "10.0.0.5"},
    {"host": "node", "network": "a", "address": "10.0.0.5"},
    {"host": "node", "network": "b", "address": "10.1.0.6"},
]


@pytest.mark.parametrize(
    ("rank", "cards", "own_name_is", "user_set", "expected"),
    [
        (0, CARDS, "127.0.1.1", "", "towards 10.1.0.6"),  # the first rank elsewhere
        (1, CARDS, "", "", "towards 10.1.0.6"),
        (2, CARDS, "", "", "towards 10.0.0.5"),  # where it has reached rank 0
        (2, CARDS, "192.0.2.7", "", "towards 10.0.0.5"),  # an address that this host does not have
        (2, CARDS, "10.1.0.6", "", None),  # gloo finds it by itself
        (0, CARDS[:2], "127.0.1.1", "", "lo"),
        (0, CARDS, "127.0.1.1", "eth7", "eth7"),
    ],
)
def test_gloo_uses_the_interface_towards_rank_0(monkeypatch, rank, cards, own_name_is, user_set, expected):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", user_set)
    if not user_set:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(network, "resolve_host", lambda name: own_name_is)
    monkeypatch.setattr(network, "is_local_address", lambda address: address == "10.1.0.6")
    monkeypatch.setattr(network, "find_interface_towards", lambda host: f"towards {host}")
    network.set_gloo_interface(rank, cards, "10.0.0.5")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


# ---- comm.interface ----
@pytest.mark.parametrize("option", [None, "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"])
def test_open_mpi_gets_the_interface_unless_the_user_has_set_one(option):
    """Open MPI does not start if both options are set."""
    env = {option: "docker0"} if option else {}
    network.set_interface_variables("ib0", env)
    chosen = {name: value for name, value in env.items() if name.startswith("OMPI")}
    assert chosen == ({option: "docker0"} if option else {"OMPI_MCA_btl_tcp_if_include": "ib0"})


def test_gloo_and_nccl_get_the_exact_interface_name(interfaces, monkeypatch):
    """NCCL_SOCKET_IFNAME matches prefixes unless the name begins with "=" (NCCL's user guide)."""
    told = []
    monkeypatch.setattr(torch_dist, "connect", lambda *arguments: told.append(arguments[-1]) or SimpleNamespace())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        monkeypatch.setenv(name, "eth7")
    two = Job("torchrun", 0, 2, 0, 1, "a02")
    error_reporter = SimpleNamespace(close=None, subscribe=lambda subscriber: None)
    connect(two, "gloo", error_reporter=error_reporter, interface=["ens3", "ib*"])
    assert told == ["10.1.0.5"]
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib1", "=ib1")
    with pytest.raises(UserError, match=r"comm\.interface: ens3"):
        connect(two, "gloo", error_reporter=error_reporter, interface="ens3")
    assert connect(Job("single", 0, 1, 0, 1, "a02"), interface="ens3").size == 1  # which needs none


def test_the_interface_may_differ_between_hosts():
    """The setting is compared neither between ranks nor by `fedmpi resume`."""
    quick = ROOT / "configs" / "quickstart.yaml"
    one, other = (config.load(quick, [f"comm.interface={text}"]) for text in ("[ens3, ib*]", "eth0"))
    assert one.comm.interface == ["ens3", "ib*"]
    assert one.digest_items() == other.digest_items()


@pytest.mark.parametrize("value", ["[]", "3", '""'])
def test_an_invalid_interface_name_is_rejected(value):
    with pytest.raises(UserError, match=r"comm\.interface"):
        config.load(ROOT / "configs" / "quickstart.yaml", [f"comm.interface={value}"])
