"""When NCCL is chosen, how its group is created, and the messages about its failures."""

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


def describe_ranks(*changes, backend="auto"):
    """Return the description of each rank on one host with a GPU of its own, with some fields replaced."""
    own = [{"backend": backend, "host": "a", "card": f"0000:{n}:00", "nccl": True} for n in range(9)]
    return [card | change for card, change in zip(own, changes, strict=False)]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (({}, {}, {}), ""),
        (({}, NO_GPU, {}), r"rank 1 on a computes without a GPU"),
        (
            ({}, {}, FIRST),
            r"ranks 0 and 2 share GPU 0000:0:00 of a \(or slices of it, MIG\).*server.trains_clients: true.*: gloo",
        ),
        (({}, {}, FIRST | {"host": "b"}), ""),
        (({}, {"nccl": False}), r"rank 1 on a has a PyTorch that was built without NCCL"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(changes, refused):
    """The back end `auto` chooses gloo if NCCL is impossible; `nccl` is then an error with the reason."""
    assert choose_backend("auto", describe_ranks(*changes)) == ("gloo" if refused else "nccl")
    assert choose_backend("gloo", describe_ranks(*changes, backend="gloo")) == "gloo"
    if refused:
        with pytest.raises(UserError, match=f"(?s)comm.backend: nccl, but .*{refused}"):
            choose_backend("nccl", describe_ranks(*changes, backend="nccl"))
    else:
        assert choose_backend("nccl", describe_ranks(*changes, backend="nccl")) == "nccl"


def test_different_back_ends_are_an_error():
    with pytest.raises(UserError, match="differs between ranks"):
        choose_backend("gloo", [*describe_ranks(NO_GPU, backend="gloo"), *describe_ranks({}, backend="nccl")])


@pytest.mark.parametrize(
    ("address", "card"),
    [({}, "u"), ({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}, "0000:3b:00")],
    ids=["torch does not tell the address", "torch tells it"],
)
def test_a_gpu_is_identified_by_its_pci_address(monkeypatch, address, card):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u", **address))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    facts = {"backend": "auto", "host": "a", "nccl": True}
    assert describe_rank("auto", "a", GPU) == facts | {"card": card}
    assert describe_rank("auto", "a", CPU) == facts | {"card": ""}


# ---- its group ----
@pytest.mark.parametrize("user_set", ["", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_the_nccl_group_is_created_on_the_ranks_own_gpu(monkeypatch, user_set):
    """A new thread starts on the host's first GPU, whatever the rank's GPU is.

    Torch's watchdog must leave errors to fedmpi, unless the user has configured it.
    """
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


class FakeStore(dist.HashStore):
    """A store whose connections end like those of the ranks."""

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
    """Return a function connect(error) that connects a single rank by NCCL, where creating the group raises `error`."""
    store = FakeStore()
    monkeypatch.setattr(torch_dist.lookup, "connect_to_store", lambda *_, **__: store)
    monkeypatch.setattr(torch_dist, "choose_backend", lambda backend, describe_ranks: "nccl")
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


def test_the_store_is_told_when_a_rank_ends(connecting):
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
def test_a_failed_group_reports_nccls_last_error_and_possible_causes(connecting, error, begins, ends):
    with pytest.raises(RankLostError) as ended:
        connecting(error)
    first, *rest = str(ended.value).splitlines()
    assert first.startswith(begins)
    assert first.endswith(ends)
    assert rest == NCCL_REMEDY.splitlines()
    assert all(word in NCCL_REMEDY for word in ("rank has died", "NCCL_SOCKET_IFNAME", "shm-size", "--gpu-bind=none"))


def test_other_errors_keep_their_own_remedy(connecting):
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
def test_a_failed_message_names_the_lost_rank(gone, said):
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
def test_the_end_of_a_process_is_noticed_at_once(ended, said, after):
    """NCCL itself would continue to wait."""
    clock, store = SkippingClock(), dist.HashStore()
    if ended:
        store.set(torch_dist.ENDED_RANK_KEY, "2")
    comm = torch_dist.NcclCommunicator(Job("slurm", 1, 3, 1, 3, "a"), CPU, store, Timeouts(round=9, clock=clock))
    comm.hosts = {2: "b"}
    with pytest.raises(RankLostError, match=said):
        comm._wait([0], lambda: [SimpleNamespace(is_completed=lambda: False)])
    assert clock.now() == pytest.approx(after, abs=0.01)
