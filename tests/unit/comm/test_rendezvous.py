"""Ranks find each other by the launcher's variables alone, even if a foreign service uses the derived port."""

import contextlib
import socket
import threading

import pytest
from simulated_job import SkippingClock

from fedmpi.comm import launchers
from fedmpi.comm.base import RankLostError
from fedmpi.comm.launchers import Job
from fedmpi.comm.rendezvous import auth, lookup
from fedmpi.comm.rendezvous.store_server import StoreServer
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import UserError


def step_env(job_id, **more):
    step = {"SLURM_JOB_ID": str(job_id), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "no-such-host"}  # one host
    return step | {"FEDMPI_SECRET": "s" * 32} | more


RANKS = [Job("slurm", rank, 2, rank, 2, "here") for rank in range(2)]


@pytest.fixture
def job_id():
    """Return the id of a job whose first ports are free on this machine."""
    jobs = ((job_id, lookup.derive_ports(f"{job_id}.0.0")[:4]) for job_id in range(10**6, 2 * 10**6))
    return next(job_id for job_id, ports in jobs if free(*ports))


def free(*ports):
    try:
        for port in ports:
            socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    """Run stores as threads of this process instead of as processes."""
    started = []

    def start(listener, key):
        started.append(StoreServer(listener, key))
        threading.Thread(target=started[-1].run, daemon=True).start()

    monkeypatch.setattr(lookup.store_server, "start_store_process", start)
    yield
    for server in started:
        server.close()


def test_another_secret_or_another_job_is_an_error(job_id):
    lookup.connect_to_store(RANKS[0], 60, step_env(job_id))
    skipping = Timeouts(clock=SkippingClock())
    with pytest.raises(
        RankLostError, match=r"rank 0 is silent.*another secret.*~/\.fedmpi/secret, or the same FEDMPI_SECRET"
    ):
        lookup.connect_to_store(RANKS[1], 60, step_env(job_id, FEDMPI_SECRET="b" * 32), skipping)
    ours = lookup.connect_to_store(RANKS[1], 60, step_env(job_id))
    ours.set("a", "1")
    key = auth.derive_job_key("slurm 4711.0.0", step_env(job_id))
    with pytest.raises(RankLostError):  # the same user's step of another name, on a port of ours
        lookup.retry_connecting([ours.address], key, 60, Timeouts(clock=SkippingClock()))


def test_foreign_services_are_skipped_and_early_ranks_wait(job_id, monkeypatch):
    """One service never answers, one speaks HTTP, one sends bytes that are no text.

    Rank 0 comes after all have been tried.
    """
    monkeypatch.setattr(lookup, "CONNECT_TIMEOUTS_S", (0.1, 10.0))
    env = step_env(job_id)
    sockets, tried = [], threading.Event()

    def foreign(port, line, visited):
        listener = socket.create_server(("", port))
        sockets.append(listener)

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    guest, _ = listener.accept()
                    sockets.append(guest)
                    guest.sendall(line)
                    visited()

        threading.Thread(target=answer, daemon=True).start()

    def start_rank_0():
        tried.wait()
        lookup.connect_to_store(RANKS[0], 60, env)

    first = lookup.derive_ports(lookup.identify_slurm_step(env))
    foreign(first[0], b"", lambda: None)
    foreign(first[1], b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, lambda: None)
    foreign(first[2], b"\xff\xfe\x00 fedmpi\n" * 9, tried.set)
    threading.Thread(target=start_rank_0, daemon=True).start()
    store = lookup.connect_to_store(RANKS[1], 60, env)
    assert store.address[1] == first[3]
    for each in sockets:
        each.close()


def test_without_a_free_port_there_is_an_error(monkeypatch, job_id):
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(lookup, "derive_ports", lambda step: [taken.getsockname()[1]])
        with pytest.raises(UserError, match=r"rank 0 cannot listen on port \d+ of here"):
            lookup.connect_to_store(RANKS[0], 5, step_env(1))


def test_ports_are_below_the_ephemeral_range_and_differ_between_jobs_and_requeues():
    env = step_env(4711)
    assert lookup.identify_slurm_step(env) == "4711.0.0"
    assert lookup.identify_slurm_step(env | {"SLURM_RESTART_COUNT": "1"}) == "4711.0.1"
    here, there = lookup.derive_ports("4711.0.0"), lookup.derive_ports("4711.0.1")
    assert here == lookup.derive_ports("4711.0.0")
    assert len(here) == 16
    assert all(10_000 <= port < 30_000 for port in here + there)
    assert set(here) != set(there)


def test_rank_0_listens_only_where_ranks_connect(monkeypatch):
    names = {"own": "127.0.0.2", "near": "127.0.1.1", "far": "192.0.2.7", "unknown": ""}
    monkeypatch.setattr(lookup.network, "resolve_host", names.__getitem__)
    monkeypatch.setattr(lookup.network, "is_loopback", lambda address: address in ("", "127.0.1.1"))
    assert [lookup.choose_listen_address(name) for name in names] == ["127.0.0.2", "", "", ""]
    with auth.open_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with auth.open_listener("", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_an_impossible_host_name_is_skipped():
    """Python raises UnicodeError for a label of a host name that is empty or longer than 63 characters."""
    with pytest.raises(RankLostError, match="host name resolves here"):
        lookup.retry_connecting([("a..b", 1), ("a" * 64, 1)], b"k" * 32, 0, Timeouts(clock=SkippingClock()))


def env_of(rank, size, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "FEDMPI_SECRET": "s" * 32}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}], ids=["env", "torchrun"])
def test_ranks_connect_by_torch_variables(more):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    envs = [env_of(rank, 2, port) | ({"LOCAL_RANK": str(rank)} | more if more else {}) for rank in range(2)]
    jobs = [launchers.detect(env) for env in envs]
    assert {job.launcher for job in jobs} == {"torchrun" if more else "env://"}
    stores = [lookup.connect_to_store(job, 60, env) for job, env in zip(jobs, envs, strict=True)]
    stores[0].set("a", "1")
    assert stores[1].get("a") == b"1"
    if not more:
        with pytest.raises(UserError, match=rf"rank 0 cannot listen on port {port} of .*\n.*another MASTER_PORT"):
            lookup.connect_to_store(jobs[0], 60, envs[0])


def test_a_first_host_that_does_not_resolve_is_an_immediate_error():
    env = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "no-such-host-[1-2].invalid"}
    with pytest.raises(UserError, match="'no-such-host-1"):
        lookup.connect_to_store(Job("slurm", 1, 2, 0, 1, "here"), 30, env | {"FEDMPI_SECRET": "s" * 32})


# ---- the user's secret ----
def test_ranks_that_start_together_create_one_secret(tmp_path):
    env, keys = {"HOME": str(tmp_path)}, set()
    threads = [threading.Thread(target=lambda: keys.add(auth.derive_job_key("a", env))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / ".fedmpi").iterdir()] == ["secret"]


def test_the_variable_overrides_the_secret_file_and_keys_differ_by_job(tmp_path):
    env = {"HOME": str(tmp_path), "FEDMPI_SECRET": "x" * 32}
    assert (
        auth.derive_job_key("a", env)
        != auth.derive_job_key("b", env)
        != auth.derive_job_key("b", env | {"FEDMPI_SECRET": "y" * 32})
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.chmod(0o640), ": other users may read this secret; run chmod 600"),
        (lambda file: file.write_text("short\n"), " has 5 characters; at least 32 are needed: delete it"),
        (
            lambda file: (file.unlink(), file.parent.rmdir(), file.parent.write_text("")),
            ": (Not a dir|File exists)",
        ),
    ],
)
def test_an_unusable_secret_is_rejected(tmp_path, spoil, message):
    env = {"HOME": str(tmp_path)}
    auth.derive_job_key("a", env)
    spoil(tmp_path / ".fedmpi" / "secret")
    with pytest.raises(UserError, match=rf"\.fedmpi/secret({message}).*export FEDMPI_SECRET"):
        auth.derive_job_key("a", env)


def test_a_short_secret_variable_is_rejected():
    with pytest.raises(UserError, match="FEDMPI_SECRET has 5 characters; at least 32"):
        auth.derive_job_key("a", {"FEDMPI_SECRET": "guess"})
