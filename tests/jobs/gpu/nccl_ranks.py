"""Run the checks of tests/jobs/comm on NcclCommunicator.

Run once per rank: nccl_ranks.py FOLDER gloo|nccl

gloo: the code of NcclCommunicator over torch's default group of gloo, on CPUs, with any number of ranks; then whole
runs, and a rank that does not answer. nccl: NCCL itself on one GPU, with one rank, or with several ranks if this NCCL
lets ranks share a GPU.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "jobs" / "comm"), str(ROOT / "tests")]

import battery  # noqa: E402
from simulated_cuda import PolledWork  # noqa: E402

from fedmpi.comm import Timeouts, detect, network  # noqa: E402
from fedmpi.comm.backends import torch_dist  # noqa: E402
from fedmpi.comm.base import RankTimeoutError  # noqa: E402
from fedmpi.comm.failures.error_reporter import ErrorReporter  # noqa: E402
from fedmpi.comm.rendezvous import lookup  # noqa: E402


def connect(kind):
    job = detect(os.environ)
    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    store = lookup.connect_to_store(job, 30) if job.size > 1 else dist.HashStore()
    if kind == "nccl":
        torch.cuda.set_device(device)
        torch_dist.create_process_group("nccl", job, device, store, 60)
    else:
        cards = [{"host": job.host, "network": "of all ranks", "address": "127.0.0.1"}] * job.size
        network.set_gloo_interface(job.rank, cards, "127.0.0.1")
        group = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", None, timedelta(seconds=60), job.size, job.rank, group)
        post = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda operations: [PolledWork(work) for work in post(operations)]
    comm, error_reporter = torch_dist.NcclCommunicator(job, device, store, Timeouts(round=20)), ErrorReporter(job)
    if job.size > 1:
        error_reporter.listen(store.open_connection)
        error_reporter.waiting_for = lambda: comm.waiting_for
    return comm, error_reporter


def check_nccl_to_oneself(comm):
    """With a single rank a message goes to the rank itself; `exchange` would only copy it."""
    x, first, second = battery.message(0, 0, 1000), torch.zeros(1000), torch.zeros(10)
    comm._exchange([(0, x), (0, x[:10])], [(0, first), (0, second)])
    assert torch.equal(first, x)
    assert torch.equal(second, x[:10])


def hashes_of_runs(comm, folder):
    """Return the hashes of several runs.

    Uploads are summed while they arrive, or are sharded, in small chunks; other runs have small cohorts.
    """
    from helpers import prepare, settings

    from fedmpi.flat import linear
    from fedmpi.runtime.checkpoints import ClientStateFiles

    linear.CHUNK, linear.BLOCK, found = 64, 128, {}
    for placement in ("root", "sharded"):
        it = prepare(settings("scaffold", server={"placement": placement}), comm=comm, device=comm.device)
        it.fed.run()
        found[placement] = it.hashes
    it = prepare(settings("scaffold", cohort={"fraction": 0.15}), comm=comm, device=comm.device)
    it.fed.states.store, it.fed.states.max_in_memory = ClientStateFiles(folder / "state"), 10**6
    it.fed.run()  # one rank trains nobody, and says so
    return found | {"idle": it.hashes}


def wait_for_files(folder, ranks):
    while not all((folder / f"{rank}.silence").exists() for rank in ranks):
        time.sleep(0.05)


def messages_about_a_silent_rank(comm, error_reporter, folder):
    """Return what the other ranks report about the last rank, which waits until they have reported it."""
    comm.message_timeout_s = 1.0 if comm.rank else 2.0  # rank 1 waits for rank 0, and is the first to lose its patience
    try:
        if comm.rank == comm.size - 1:
            wait_for_files(folder, range(comm.size - 1))
            return ""
        x, last = torch.zeros(4, device=comm.device), comm.size - 1
        comm.exchange(*(([], [(last, x)]) if comm.rank == 0 else ([], [(0, x)])))
    except RankTimeoutError as error:
        return str(error.with_other_peers(error_reporter.find_root_cause(error.peers)))
    return "nothing"


def main():
    folder, kind = sys.argv[1:]
    torch.set_num_threads(1)
    comm, error_reporter = connect(kind)
    if kind == "nccl" and comm.size == 1:
        battery.CHECKS["check_nccl_to_oneself"] = check_nccl_to_oneself
    battery.run(comm, folder)
    torch.set_default_device("cpu")
    if comm.size > 1:
        found = hashes_of_runs(comm, Path(folder))
        if comm.rank == 0:
            Path(folder, "hashes").write_text(json.dumps(found))
        said = messages_about_a_silent_rank(comm, error_reporter, Path(folder))
        Path(folder, f"{comm.rank}.silence").write_text(json.dumps(said))
        wait_for_files(Path(folder), range(comm.size))  # rank 0 holds the store
        os._exit(0)
    comm.close()


if __name__ == "__main__":
    main()
