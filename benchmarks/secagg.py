"""The cost of secure aggregation (privacy.secagg).

    python benchmarks/secagg.py phases                seconds of each phase, for 8 clients and 25.6 M entries
    python benchmarks/secagg.py round --threads 2     a round of cnn.py with and without secure aggregation
    mpirun -n 3 python benchmarks/secagg.py round --threads 1

`phases` runs the protocol in one process on one core. For the masks of one client, and for the server's unmasking, the
time is compared with that of rounding a vector to integers and adding it to the sum, which is done in any case. `round`
runs blocks of rounds with and without secure aggregation in turn; results are medians of the seconds of a round.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from cnn import CLIENTS, COHORT, SAMPLES, TEST, images, settings
from measure import print_result, run_in_turn

from fedmpi.comm import connect, detect
from fedmpi.config import Settings
from fedmpi.data.federated import split
from fedmpi.engine.transport.gather_sums import UNIT
from fedmpi.privacy.secagg.masks import MaskStreams
from fedmpi.runtime import build
from fedmpi.runtime.device import keep_freed_memory

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from secagg_rounds import SecureSum, make_session


def measure_phases(a):
    """Print the seconds of each phase of the protocol."""
    torch.set_num_threads(1)
    generator, n = torch.Generator().manual_seed(0), a.clients
    row = torch.randn(a.entries, generator=generator) * 0.01
    vector, total = torch.empty(a.entries, dtype=torch.int64), torch.zeros(a.entries, dtype=torch.int64)
    secure = SecureSum(make_session(range(n), n // 2 + 1), dict.fromkeys(range(n), vector))

    def timed(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def round_and_add():
        vector.copy_(row.double().mul_(1 / n / UNIT).round_())
        total.add_(vector)

    what = f"{n} clients, {a.entries / 1e6:,.1f} M entries"
    timed(round_and_add)
    plain = timed(round_and_add)
    names = {"keys": secure.advertise, "shares": secure.share}
    seconds = {name: timed(work) / n for name, work in names.items()}
    received = secure.server.collect_shares(secure.sent)
    streams = {k: secure.clients[k].make_masks(received[k]) for k in range(n)}
    mine = MaskStreams(streams[0])
    masking = timed(lambda: mine.add_to(vector))
    secure.masked = dict.fromkeys(range(n), vector[:0])
    secure.total = vector[:0]
    seconds["confirmation and shares for unmasking"] = (timed(secure.confirm) + timed(secure.reveal)) / n
    unmasking = secure.server.make_unmasking(secure.revealed)
    removal = timed(lambda: unmasking.add_to(total))
    for name, s in seconds.items():
        print(f"{name}, {what}: {1e3 * s:.2f} ms a client", flush=True)
    print_result(f"masks of one client, {what}", ("masks", masking), ("rounding and sum", plain))
    print_result(f"unmasking, {what}", ("unmasking", removal), ("rounding and sum", plain))


def measure_rounds(a):
    """Print the seconds of a round with and without secure aggregation."""
    job = detect(os.environ)
    comm = connect(job, "gloo" if job.size > 1 else "auto")
    keep_freed_memory()
    torch.set_num_threads(a.threads)
    data = split(images(a.samples, a.test), "iid", CLIENTS, 0, "global")
    plain = settings(a.rounds, "fp32")
    secure = Settings.model_validate(plain.model_dump(mode="json", exclude_unset=True) | {
        "privacy": {"secagg": {"threshold": COHORT // 2 + 1}}
    })  # fmt: skip
    experiments = {
        name: build.make_experiment(s, data, torch.device("cpu")) for name, s in (("secure", secure), ("plain", plain))
    }

    def run(name):
        comm.allgather_bytes(b"", 600)
        build.make_federation(experiments[name], comm, lambda: False).run()

    seconds = run_in_turn({name: lambda name=name: run(name) for name in experiments}, a.blocks + 1)
    if comm.rank == 0:
        ours, theirs = (seconds[name] / a.rounds for name in ("secure", "plain"))
        print_result(f"round of W1, {comm.size} rank(s)", ("secure", ours), ("plain", theirs))
    comm.allgather_bytes(b"", 600)
    comm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("phases", "round"))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--entries", type=int, default=25_600_000)
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5, help="in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images a client")
    parser.add_argument("--test", type=int, default=TEST)
    arguments = parser.parse_args()
    (measure_phases if arguments.what == "phases" else measure_rounds)(arguments)
