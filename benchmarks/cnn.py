"""Compare a round of several seconds in fedmpi with a minimal loop by hand.

    python benchmarks/cnn.py [--threads 2]

100 clients with 600 images of 1x28x28, 10 clients per round, the CNN with 1,663,370 parameters, one epoch in batches of
50, momentum 0.9; then the global model is evaluated on 10,000 images. The loop by hand is a process of its own, with
channels-last memory: w is copied into views of one vector, a batch is gathered by one call, torch's fused kernel makes
the step with a momentum in a second vector, the mean takes one call per client; the evaluation reads views of the
images, --judged at a time.
    python benchmarks/cnn.py --threads 2 [--precision bf16]      fedmpi in one process with that many threads
    mpirun -n 3 python benchmarks/cnn.py --threads 1 --hand 2    over ranks; the loop by hand is still one process
    python benchmarks/cnn.py --threads 2 --apart 2               an upper bound for ranks: so many loops by hand of one
                                                                 thread divide clients and images, without messages
The loop by hand computes in fp32 with the C library's memory management; --hand-precision and --hand-keeps (fedmpi's
setting, runtime/device.py) remove these differences. Blocks of --rounds rounds run in turn; results are medians of the
seconds of a round and of processor seconds per second (of rank 0), and their ratios. With several ranks, also the
fraction of a round in which they wait (the spans WAIT_SPANS of the timeline, without the first round of a block), of
the rank that waits least and as the mean of each rank. The evaluation after the last round of a block is done by rank 0
alone on one core; earlier evaluations run at the same time as the next round. With two rounds per block, three ranks on
two cores would seem a seventh slower than in a long run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import fmean, median

import torch
from torch.nn.functional import cross_entropy

from fedmpi.comm import connect, detect
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.engine.tracing import WAIT_SPANS
from fedmpi.runtime import build, build_model
from fedmpi.runtime.device import keep_freed_memory

CLIENTS, COHORT, SAMPLES, TEST, BATCH, LR, MOMENTUM = 100, 10, 600, 10_000, 50, 0.01, 0.9


def settings(rounds, precision):
    """Return fedmpi's settings of the task."""
    return Settings.model_validate(
        {
            "rounds": rounds,
            "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": CLIENTS}},
            "model": {"name": "mcmahan_cnn"},
            "method": {"name": "fedavg"},
            "train": {"batch_size": BATCH, "lr": LR, "momentum": MOMENTUM},
            "cohort": {"fraction": COHORT / CLIENTS},
            "compute": {"precision": precision},
        }
    )


def images(samples, test):
    """Return images with random pixels of 256 values and random labels, since their content does not affect speed."""
    g, n = torch.Generator().manual_seed(0), CLIENTS * samples
    x = torch.randint(256, (n + test, 1, 28, 28), generator=g) / 255
    y = torch.randint(10, (len(x),), generator=g)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=10)


class HandWrittenLoop:
    """A minimal training loop for the same task."""

    def __init__(self, module, data, judged, precision):
        self.module, self.data, self.judged = module, data, judged
        self.cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
        self.parameters = list(module.parameters())
        d = sum(p.numel() for p in self.parameters)
        self.live, self.v, self.total = torch.empty(d), torch.zeros(d), torch.empty(d)
        self.momenta, at = [], 0
        for p in self.parameters:
            view, v = (self.shaped(flat[at : at + p.numel()], p) for flat in (self.live, self.v))
            view.copy_(p.detach())
            p.data = view
            self.momenta.append(v)
            at += p.numel()
        self.w = self.live.clone()

    @staticmethod
    def shaped(flat, p):
        if p.dim() != 4:
            return flat.view(p.shape)
        o, i, h, w = p.shape
        return flat.view(o, h, w, i).permute(0, 3, 1, 2)

    def step(self, x, y):
        with self.cast:
            f = self.module(x)
        cross_entropy(f.float(), y).backward()
        torch._fused_sgd_(
            self.parameters, [p.grad for p in self.parameters], self.momenta, lr=LR, momentum=MOMENTUM,
            weight_decay=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        for p in self.parameters:
            p.grad = None

    def round(self, share, shares):
        """Train the clients, and evaluate on the test images, of one of `shares` loops for one round."""
        members = range(share, COHORT, shares)
        self.module.train()
        self.total.zero_()
        for k in members:
            self.live.copy_(self.w)
            self.v.zero_()
            shard = self.data.train[k]
            order = shard.index[torch.randperm(len(shard))]
            for at in range(0, len(order), BATCH):
                rows = order[at : at + BATCH]
                self.step(shard.x.index_select(0, rows), shard.y.index_select(0, rows))
            self.total.add_(self.live, alpha=1 / len(members))
        self.w.copy_(self.total)
        self.live.copy_(self.w)
        return self.evaluate(share, shares)

    def evaluate(self, share, shares):
        self.module.eval()
        test, n = self.data.global_test, len(self.data.global_test)
        x, y = (each[n * share // shares : n * (share + 1) // shares] for each in (test.x, test.y))
        loss, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        with torch.inference_mode(), self.cast:
            for at in range(0, len(y), self.judged):
                f, here = self.module(x[at : at + self.judged]).float(), y[at : at + self.judged]
                loss += cross_entropy(f, here, reduction="sum")
                correct += (f.argmax(1) == here).sum()
        return loss.item() / len(y), correct.item() / len(y)


def timed(work):
    """Run work() and return its wall seconds and processor seconds."""
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


def run_hand_written_loop(a):
    """Run the hand-written loop in this process: for each line of stdin, train a block of rounds, print its times."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count()))  # a launcher may have bound rank 0 to one core
    if a.hand_keeps:
        keep_freed_memory()
    torch.set_num_threads(a.hand or a.threads)
    data = split(images(a.samples, a.test), "iid", CLIENTS, 0, "global").to("cpu", channels_last=True)
    module = build_model.make_module(settings(1, "fp32"), data.input_shape, data.classes)
    hand = HandWrittenLoop(module, data, a.judged, a.hand_precision)
    for _ in sys.stdin:
        print(*timed(lambda: [hand.round(a.share, a.apart) for _ in range(a.rounds)]), flush=True)


class HandWrittenProcesses:
    """Hand-written loops, each in a process of its own, that run at the same time."""

    def __init__(self, *options):
        command = [sys.executable, __file__, *sys.argv[1:], "--alone"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.all = [subprocess.Popen([*command, *each], **pipes) for each in options]

    def block(self):
        """Run a block in all loops; return the seconds of the slowest loop, and the processor seconds of all."""
        for each in self.all:
            each.stdin.write("\n")
        seconds, busy = zip(
            *([float(word) for word in each.stdout.readline().split()] for each in self.all), strict=True
        )
        return max(seconds), sum(busy)

    def close(self):
        for each in self.all:
            each.stdin.close()
            each.wait()


def print_upper_bound(a):
    """Compare hand-written loops of one thread each with one hand-written loop of --threads threads."""
    shares = [["--threads", "1", "--hand", "1", "--share", str(i)] for i in range(a.apart)]
    apart, complete = HandWrittenProcesses(*shares), HandWrittenProcesses(["--apart", "1"])
    theirs, ours = zip(*((complete.block(), apart.block()) for _ in range(a.blocks + 1)), strict=True)
    for hands in (apart, complete):
        hands.close()
    print_comparison(a, f"{a.apart} loops by hand", ours[1:], theirs[1:], "apart")


def compare(a):
    """Run fedmpi and the hand-written loop in turn, and print the comparison."""
    job = detect(os.environ)
    comm = connect(job, "gloo" if job.size > 1 else "auto")
    keep_freed_memory()
    torch.set_num_threads(a.threads)
    s = settings(a.rounds, a.precision)
    data = split(images(a.samples, a.test), "iid", CLIENTS, 0, "global")
    experiment = build.make_experiment(s, data, torch.device("cpu"))
    if comm.rank == 0:
        hand = HandWrittenProcesses([])
    ours, theirs, waits = [], [], []
    for block in range(a.blocks + 1):
        if comm.rank == 0:
            theirs.append(hand.block())
        comm.allgather_bytes(b"", 600)  # meanwhile the other ranks sleep
        fed, lines = build.make_federation(experiment, comm, lambda: False), []
        fed.timeline.write_row = lines.append
        ours.append(timed(fed.run))
        waits += [waiting_fraction(line) for line in lines if block and 0 < line["round"] < a.rounds]
    waits = [json.loads(output) for output in comm.allgather_bytes(json.dumps(waits).encode(), 600)]
    if comm.rank == 0:
        hand.close()
        print_comparison(a, f"{comm.size} rank(s), {a.precision}", ours[1:], theirs[1:], "fedmpi")
        if comm.size > 1 and waits[0]:
            least = median(map(min, zip(*waits, strict=True)))
            each = ", ".join(f"rank {rank} {100 * fmean(shares):.1f} %" for rank, shares in enumerate(waits))
            print(f"waiting: the rank that waits least {100 * least:.1f} % of a round (median); {each}")
    comm.allgather_bytes(b"", 600)
    comm.close()


def waiting_fraction(line):
    """Return the fraction of a round in which a rank waits, from its line of the timeline."""
    return round(sum(ms for what, _, ms, *_ in line["spans"] if what in WAIT_SPANS) / 1e3 / line["s"], 4)


def print_comparison(a, what, ours, theirs, name):
    """Print the seconds of a round, the cores in use, and their ratios for both sides."""
    (ours_s, ours_cpu), (hand_s, hand_cpu) = zip(*ours, strict=True), zip(*theirs, strict=True)
    pairs = [p / q for p, q in zip(ours_s, hand_s, strict=True)]
    each = [
        f"{who} {median(seconds) / a.rounds:.2f} s a round ({median(cpu) / median(seconds):.2f} cores)"
        for who, seconds, cpu in ((name, ours_s, ours_cpu), ("by hand", hand_s, hand_cpu))
    ]
    print(
        f"{what}: {', '.join(each)}; ratio {median(ours_s) / median(hand_s):.3f} "
        f"(pairs {min(pairs):.3f} to {max(pairs):.3f}), of processor seconds {median(ours_cpu) / median(hand_cpu):.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--hand", type=int, help="threads of the hand-written loop, if not the same")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hand-precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hand-keeps", action="store_true")
    parser.add_argument("--judged", type=int, default=100, help="images a batch of the hand-written evaluation")
    parser.add_argument("--rounds", type=int, default=5, help="in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images a client")
    parser.add_argument("--test", type=int, default=TEST)
    parser.add_argument("--apart", type=int, default=1, help="hand-written loops that share the work")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (run_hand_written_loop if arguments.alone else print_upper_bound if arguments.apart > 1 else compare)(arguments)
