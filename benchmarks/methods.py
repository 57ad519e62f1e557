"""Compare all methods on one small task in a table.

    python benchmarks/methods.py [NAME ...] [--rounds 20 | --passes]

Handwritten digits over ten clients, Dirichlet(0.1), every client in every round, the same training for all. `accuracy`
is the global model's on the global test set, omitted if clients train parameters that are never uploaded; `personal` is
the mean over clients of the accuracy of each client's own model on its own test split; `up` and `down` are the bytes
that rank 0 received and sent in all rounds. A method that needs validation rows gets a tenth of the training rows.

--passes: the cost of a round relative to FedAvg's. Four clients with 300 images of 1x28x28, the CNN with 1,663,370
parameters, one epoch in batches of 50, without evaluation, both in turn, one thread; medians of processor seconds.
`passes` is the cost by the method's equations (PASSES), relative to FedAvg: a forward pass counts 1, a backward pass 2,
a pass through the head alone 0; `measured` is the ratio of the measured times; `of passes` is `measured` divided by
`passes`.
"""

import argparse
import math
import time
from statistics import median

import torch

from fedmpi import config, methods
from fedmpi.comm.base import SingleProcess
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.registry import load_object
from fedmpi.data.dataset import Dataset
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.method import PLAIN_SGD, VALIDATION
from fedmpi.runtime import build, build_data
from fedmpi.runtime.device import keep_freed_memory

SETTINGS = [
    "data.partition.clients=10",
    "data.partition.alpha=0.1",
    "data.partition.min_size=10",
    "train.epochs=2",
    "train.batch_size=20",
    "train.lr=0.05",
    "train.momentum=0.5",
    "evaluate.protocol=[global,personal]",
    "evaluate.every=1000",
]

# Forward and backward passes through the body over a client's samples in a round, of methods that do not need 1 and 1.
PASSES = {
    "apfl": (2, 2, "the gradient at the mixed model, too"),
    "ditto": (2, 2, "the own model's epoch after the shared one's"),
    "fedala": (1.8, 1.8, "W is learned on 0.8 of the samples, by gradients of which the head's part counts"),
    "fedasam": (2, 2, "the gradient that perturbs, then the one that counts"),
    "fedatom_personal": (2, 2, "the own atoms' epoch after the shared weights'"),
    "fedfomo": (0.9 + 7 * 0.1, 0.9, "a tenth of the samples is for validation, there seven models' losses"),
    "fedntd": (2, 1, "the frozen teacher's outputs"),
    "fedpac": (4, 1, "an epoch of the head; features before and after"),
    "fedpara": (1.58, 1.58, "W is made of its factors in each pass: 0.71 GFLOP beside the 1.23 of 50 images"),
    "fedrep": (11, 1, "ten epochs of the head"),
    "fedsam": (2, 2, "the gradient that perturbs, then the one that counts"),
    "fedsol": (2, 1, "the frozen teacher's outputs; g_p is the head's"),
    "gradproj": (3, 2, "the frozen teacher's outputs, and the gradient towards them"),
    "moon": (3, 1, "the features of two frozen models"),
    "pfedme": (5, 5, "five steps on each batch"),
    "pfedpara": (1.58, 1.58, "W is made of its factors in each pass: 0.71 GFLOP beside the 1.23 of 50 images"),
}


def run(name, rounds):
    """Run a method; return the last row of metrics, the bytes uploaded and downloaded, and the seconds."""
    chosen = [*SETTINGS, f"rounds={rounds}", f"method={{name: {name}}}"]
    needs = load_object(name, methods.registry, "method").needs
    if VALIDATION in needs:
        chosen.append("data.validation=0.1")
    if PLAIN_SGD in needs:
        chosen.append("train.momentum=0")
    settings = config.load("configs/quickstart.yaml", chosen)
    experiment = build.make_experiment(settings, build_data.build_partitioned_data(settings), torch.device("cpu"))
    comm, lines = SingleProcess(torch.device("cpu")), []
    fed = build.make_federation(experiment, comm, lambda: False, RunCallbacks(lines.append))
    began = time.perf_counter()
    fed.run()
    seconds = time.perf_counter() - began
    up, down = (sum(line[key] for line in lines) for key in ("received_bytes", "sent_bytes"))
    return lines[-1], up, down, seconds


def make_images(root, samples):
    """Return random images of the right shape, since their content does not affect speed; a data source."""
    g, n = torch.Generator().manual_seed(0), 4 * samples
    x, y = torch.rand(n + 20, 1, 28, 28, generator=g), torch.randint(10, (n + 20,), generator=g)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=10)


def processor_seconds(name, samples):
    """Return the processor seconds of rounds 2 and 3 of five rounds, 0 to 4.

    In round 1 FedALA learns its first W, which takes long; in the last round CCVR does not train.
    """
    needs = load_object(name, methods.registry, "method").needs
    settings = config.Settings.model_validate(
        {
            "rounds": 5,
            "data": {
                "source": f"{__file__}:make_images",
                "samples": samples,
                "partition": {"scheme": "iid", "clients": 4},
                "validation": 0.1 if VALIDATION in needs else 0.0,
                "client_test": "global",
            },
            "model": {"name": "mcmahan_cnn"},
            "method": {"name": name},
            "train": {"batch_size": 50, "lr": 0.01, "momentum": 0.0 if PLAIN_SGD in needs else 0.9},
            "evaluate": {"every": 1000},
        }
    )
    experiment = build.make_experiment(settings, build_data.build_partitioned_data(settings), torch.device("cpu"))
    marks = []
    callbacks = RunCallbacks(lambda line: marks.append(time.thread_time()))
    build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False, callbacks).run()
    return [marks[2] - marks[1], marks[3] - marks[2]]


def print_pass_costs(names, samples):
    """Measure the cost of a round of each method relative to FedAvg's, and print it with the expected cost."""
    keep_freed_memory()
    print(f"{'method':10}  {'passes':>6}  {'measured':>8}  {'of passes':>9}", flush=True)
    for name in names:
        seconds = [(processor_seconds("fedavg", samples), processor_seconds(name, samples)) for _ in range(2)]
        fedavg, own = (median(s for pair in seconds for s in pair[i]) for i in (0, 1))
        forward, backward, why = PASSES.get(name, (1, 1, ""))
        expected = (forward + 2 * backward) / 3
        print(f"{name:10}  {expected:6.2f}  {own / fedavg:8.2f}  {own / fedavg / expected:9.2f}  {why}", flush=True)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="methods; all where none is given")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--passes", action="store_true", help="what a round costs beside FedAvg's, and nothing else")
    parser.add_argument("--samples", type=int, default=300, help="images a client, with --passes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.passes:
        return print_pass_costs(arguments.names or methods.registry, arguments.samples)
    print(
        f"{'method':10}  {'accuracy':>8}  {'personal':>8}  {'std':>5}  {'up':>10}  {'down':>10}  {'seconds':>7}",
        flush=True,
    )
    for name in arguments.names or methods.registry:
        line, up, down, seconds = run(name, arguments.rounds)
        assert math.isfinite(line.get("train_loss", 0.0)), f"{name}: {line}"  # ccvr ends with a round without steps
        accuracy = f"{line['accuracy']:8.2f}" if "accuracy" in line else f"{'-':>8}"
        personal = f"{line['personal_accuracy']:8.2f}  {line['personal_accuracy_std']:5.1f}"
        print(
            f"{name:10}  {accuracy}  {personal}  {format_bytes(up):>10}  {format_bytes(down):>10}  {seconds:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
