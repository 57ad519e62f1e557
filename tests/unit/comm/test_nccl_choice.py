"""Who may use NCCL, how its group is built, and what is said where it fails."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from simulated_job import SkippingClock

from fedmpi.comm import Job, RankLostError, Timeouts
from fedmpi.comm.backends import torch_dist
from fedmpi.comm.backends.choice import NCCL_REMEDY, choose_backend, describe_rank
from fedmpi.comm.timeouts import Clock
from fedmpi.common.errors import UserError

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
NO_GPU, FIRST = {"card": ""}, {"card": "0000:0:00"}  # the latter also where both are slices of it


def cards(*changes, backend="auto"):
    """A card for each rank, on one host, with a GPU of its own; and what is different."""
    own = [{"backend": backend, "host": "a", "card": f"0000:{n}:00", "nccl": True} for n in range(9)]
    return [card | change for card, change in zip(own, changes, strict=False)]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (({}, {}, {}), ""),
        (({}, NO_GPU, {}), r"rank 1 on a computes without a GPU"),
        (
            ({}, {}, FIRST),
            r"ranks 0 and 2 share GPU 0000:0:00 of a \(or slices of it, MIG\).*server.trains_clients=true.*=gloo",
        ),
        (({}, {}, FIRST | {"host": "b"}), ""),
        (({}, {"nccl": False}), r"rank 1 on a has a PyTorch that was built without NCCL"),
    ],
)
def test_nccl_needs_a_card_for_each_rank(changes, refused):
    """auto takes gloo where NCCL would refuse; nccl is refused with the reason."""
    assert choose_backend("auto", cards(*changes)) == ("gloo" if refused else "nccl")
    assert choose_backend("gloo", cards(*changes, backend="gloo")) == "gloo"
    if refused:
        with pytest.raises(UserError, match=f"(?s)comm.backend=nccl, but .*{refused}"):
            choose_backend("nccl", cards(*changes, backend="nccl"))
    else:
        assert choose_backend("nccl", cards(*changes, backend="nccl")) == "nccl"


def test_ranks_with_different_back_ends_are_told():
    with pytest.raises(UserError, match="differs between ranks"):
        choose_backend("gloo", [*cards(NO_GPU, backend="gloo"), *cards({}, backend="nccl")])


@pytest.mark.parametrize(
    ("address", "card"),
    [({}, "u"), ({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}, "0000:3b:00")],
    ids=["torch does not tell the address", "torch tells it"],
)
def test_a_card_is_known_by_its_address(monkeypatch, address, card):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u", **address))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    facts = {"backend": "auto", "host": "a", "nccl": True}
    assert describe_rank("auto", "a", GPU) == facts | {"card": card}
    assert describe_rank("auto", "a", CPU) == facts | {"card": ""}


# ---- its group ----
@pytest.mark.parametrize("user_set", ["", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_a_group_of_gpus_is_built_on_the_ranks_own(monkeypatch, user_set):
    """By a thread, which begins on the first GPU of the host, whatever the rank's is. torch's watchdog leaves errors to
    us, unless the user has set what it is to do."""
    done, names = [], ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    for name in names:
        monkeypatch.setenv(name, "3")  # so that it is as it was in the end
        monkeypatch.delenv(name)
    if user_set:
        monkeypatch.setenv(user_set, "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device))

    def init_process_group(*_, device_id):
        done.append((device_id, {name: os.environ[name] for name in names if name in os.environ}))

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    here = torch.device("meta")  # any that can be named without a GPU
    torch_dist.create_process_group("nccl", SimpleNamespace(rank=1, size=3), here, dist.HashStore(), 60)
    handling = {user_set: "1"} if user_set else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert done == [here, (here, handling)]


class Store(dist.HashStore):
    """One whose connections end like that of the ranks."""

    def get_ip_addresses(self):
        return "127.0.0.1", "127.0.0.1"

    def open_connection(self):
        return self

    def gather(self, name, call, rank, ranks, value, seconds):
        return "all", [value]

    def set_on_disconnect(self, key, value):
        self.set(f"{key} at end", value)


class PatientClock(Clock):
    def call(self, seconds, function):
        assert seconds == 305  # the time to start, and to reply
        return function()


@pytest.fixture
def connecting(monkeypatch):
    """connect(error) as a single rank that NCCL suits: its store. error: of the building of the group."""
    store = Store()
    monkeypatch.setattr(torch_dist.lookup, "connect_to_store", lambda *_, **__: store)
    monkeypatch.setattr(torch_dist, "choose_backend", lambda backend, cards: "nccl")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def connect(error=None):
        def build(*words):
            assert words[-1] == 1860  # its watchdog has longer than a round
            if error:
                raise error

        monkeypatch.setattr(torch_dist, "create_process_group", build)
        job, error_reporter = Job("torchrun", 0, 1, 0, 1, "a"), SimpleNamespace(listen=lambda call: None)
        torch_dist.connect(job, "nccl", CPU, Timeouts(300, 1800, reply=5, clock=PatientClock()), error_reporter)
        return store

    return connect


def test_every_rank_leaves_word_of_its_end(connecting):
    assert connecting().get(f"{torch_dist.ENDED_RANK_KEY} at end") == b"0"


SAID = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error, NCCL 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""
LAST = "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)"


@pytest.mark.parametrize(
    ("error", "begins", "ends"),
    [
        (TimeoutError(), "all ranks have arrived, but nccl has not connected them within 300 s", "."),
        (
            dist.DistBackendError(f"{SAID}{LAST}\nException raised from create at ..."),
            "all ranks have arrived, but nccl cannot connect them (NCCL error in: ",
            f"; {LAST}).",
        ),
    ],
)
def test_a_group_that_cannot_be_built_names_nccls_last_error_and_all_causes(connecting, error, begins, ends):
    with pytest.raises(RankLostError) as ended:
        connecting(error)
    first, *rest = str(ended.value).splitlines()
    assert first.startswith(begins)
    assert first.endswith(ends)
    assert rest == NCCL_REMEDY.splitlines()
    assert all(word in NCCL_REMEDY for word in ("rank has died", "NCCL_SOCKET_IFNAME", "shm-size", "--gpu-bind=none"))


def test_what_is_no_failure_of_the_group_keeps_its_own_remedy(connecting):
    with pytest.raises(torch.OutOfMemoryError):
        connecting(torch.OutOfMemoryError("CUDA out of memory"))


# ---- its failures ----
@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("", r"(?s)NCCL failed, although all ranks are alive \(.*; Cuda failure 'invalid argument'\).*--gpu-bind=none"),
        (
            "no message for 5 s from rank 2 (of 3 ranks)",
            r"NCCL failed \(.*; Cuda failure 'invalid argument'\); no message for 5 s from rank 2",
        ),
    ],
)
def test_a_message_that_fails(gone, said):
    class Gone:
        def gather(self, *_):
            if gone:
                raise RankLostError(gone)
            return "all", []

    def post():
        raise dist.DistBackendError(f"{SAID}Cuda failure 'invalid argument'")

    comm = torch_dist.NcclCommunicator(Job("slurm", 1, 3, 1, 3, "a"), CPU, Gone(), Timeouts())
    with pytest.raises(RankLostError, match=said):
        comm._wait([0], post)


@pytest.mark.parametrize(
    ("ended", "said", "after"), [(True, "rank 2 on b is dead: its process", 1), (False, "silent", 9)]
)
def test_a_process_that_ends_is_noticed_at_once(ended, said, after):
    """NCCL itself would wait on."""
    clock, store = SkippingClock(), dist.HashStore()
    if ended:
        store.set(torch_dist.ENDED_RANK_KEY, "2")
    comm = torch_dist.NcclCommunicator(Job("slurm", 1, 3, 1, 3, "a"), CPU, store, Timeouts(round=9, clock=clock))
    comm.hosts = {2: "b"}
    with pytest.raises(RankLostError, match=said):
        comm._wait([0], lambda: [SimpleNamespace(is_completed=lambda: False)])
    assert clock.now() == pytest.approx(after, abs=0.01)
