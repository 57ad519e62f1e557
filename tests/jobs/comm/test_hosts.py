"""Ranks on two hosts, which are network namespaces of this machine, with unusual host names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import clean_env
from simulated_hosts import NETWORKS, SimulatedHosts, UnavailableError
from test_battery import assert_passed

HERE = Path(__file__).parent
LIMIT_S = 120
UNKNOWN = "127.0.0.1 localhost\n"  # the host's own name does not resolve
DEBIAN = UNKNOWN + "127.0.1.1 {}\n"  # it resolves to a loopback address, as Debian's installer has it
MASTER = f"{NETWORKS['net0']}.1"  # host 0


@pytest.fixture
def hosts(tmp_path, ranks):
    """Return a function that creates two hosts with the given names and /etc/hosts."""
    opened = []

    def make(hosts_file, names=("alpha.unknown", "beta.unknown")):
        (tmp_path / "hosts").mkdir()
        here = SimulatedHosts(tmp_path / "hosts", names, [hosts_file.format(name) for name in names])
        try:
            opened.append(here.__enter__())
        except UnavailableError as error:
            pytest.skip(str(error))
        return here

    yield make
    for here in opened:
        here.__exit__()


def environment(**more):
    return clean_env(PYTHONPATH=str(HERE.parents[2]), **more)


def program(ranks, *arguments, backend="gloo"):
    return [sys.executable, HERE / "battery.py", ranks.folder, backend, *arguments]


def finish(ranks, processes):
    try:
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return ranks.outcome([process.returncode for process in processes], "".join(texts))


def torchrun(ranks, here, *arguments):
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--no-python"]
    start += [f"--master-addr={MASTER}", "--master-port=29500"]
    rank = program(ranks, *arguments)
    return finish(ranks, [here.start(i, *start, f"--node-rank={i}", *rank, env=environment()) for i in range(2)])


@pytest.mark.parametrize(
    ("hosts_file", "names"),
    [(UNKNOWN, ("alpha.unknown", "beta.unknown")), (DEBIAN, ("debian", "debian"))],  # the latter: copies of one machine
)
def test_torchrun_connects_hosts_whose_names_do_not_resolve(hosts, ranks, hosts_file, names):
    assert_passed(torchrun(ranks, hosts(hosts_file, names)), 2, "GlooCommunicator")


def test_env_variables_connect_hosts_whose_names_do_not_resolve(hosts, ranks):
    """The variables are set as by Kubeflow's PyTorchJob: MASTER_ADDR is "localhost" on the host of rank 0."""
    here, processes = hosts(DEBIAN), []
    for rank, master in enumerate(("localhost", MASTER)):
        env = environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=master, MASTER_PORT="29500")
        processes.append(here.start(rank, *program(ranks), env=env))
    assert_passed(finish(ranks, processes), 2, "GlooCommunicator")


def mpirun_over(hosts, ranks, *arguments, backend="gloo", bridges=False):
    env = environment()
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{env['PATH']}")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout if mpirun else ""
    if "Open MPI) 5" not in version:
        pytest.skip("no mpirun of Open MPI 5 on PATH")
    pytest.importorskip("mpi4py")
    here = hosts(DEBIAN)
    if bridges:
        here.add_bridges()
    options = ["--host", ",".join(f"{name}:1" for name in here.names), "--prtemca", "plm_ssh_agent", here.agent()]
    options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [mpirun, *options, "--bind-to", "none", "-n", "2", *program(ranks, *arguments, backend=backend)]
    return finish(ranks, [here.start(0, *command, env=env)])


def test_mpirun_connects_hosts_whose_names_do_not_resolve(hosts, ranks):
    assert_passed(mpirun_over(hosts, ranks), 2, "GlooCommunicator")


def test_comm_interface_keeps_open_mpi_from_using_an_address_that_all_hosts_have(hosts, ranks):
    """Without comm.interface a rank connects to itself at 172.17.0.1, and the others wait for it."""
    assert_passed(mpirun_over(hosts, ranks, "net0", backend="mpi", bridges=True), 2, "MpiCommunicator")


def test_messages_use_the_interface_of_the_config(hosts, ranks):
    """The names resolve to the addresses on net0; battery.py sends at least 4 MB."""
    names = ("alpha", "beta")
    here = hosts("".join(f"{NETWORKS['net0']}.{i} {name}\n" for i, name in enumerate(names, start=1)), names)
    assert_passed(torchrun(ranks, here, "f*"), 2, "GlooCommunicator")
    assert here.sent_bytes(0, "fast0") > 4_000_000 > here.sent_bytes(0, "net0")
