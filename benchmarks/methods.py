"""Every method on one small task, one table.   python benchmarks/methods.py [NAME ...] [--rounds 20]

Handwritten digits over ten clients, Dirichlet(0.1), every client in every round, the same training for all. `accuracy`
is the global model's on the global test set, left out where clients train parts that never travel; `personal` is the
mean over clients of what each client uses, on its own test split; `up` and `down` are bytes that rank 0 received and
sent in all rounds. Options beside a method's defaults stand in OPTIONS with their reason; a method that needs
validation rows gives up a tenth of its training rows for them.
"""

import argparse
import math
import time

import torch

from fedmpi import config, methods
from fedmpi.comm.backends.solo import Solo
from fedmpi.common.registry import load
from fedmpi.engine.plan import Sink
from fedmpi.method import PLAIN_SGD, VALIDATION
from fedmpi.runtime import build, build_data
from fedmpi.runtime.memory import size_text

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


def run(name, rounds):
    """(last line of metrics, bytes up, bytes down, seconds, whether all that is trained travels)."""
    chosen = [*SETTINGS, f"rounds={rounds}", f"method={{name: {name}}}"]
    needs = load(name, methods.registry, "method").needs
    if VALIDATION in needs:
        chosen.append("data.validation=0.1")
    if PLAIN_SGD in needs:
        chosen.append("train.momentum=0")
    settings = config.load("configs/quickstart.yaml", chosen)
    made = build.experiment(settings, build_data.partitioned(settings), torch.device("cpu"))
    comm, lines = Solo(torch.device("cpu")), []
    fed = build.federation(made, comm, lambda: False, Sink(lines.append))
    began = time.perf_counter()
    fed.run()
    seconds = time.perf_counter() - began
    up, down = (sum(line[key] for line in lines) for key in ("received_bytes", "sent_bytes"))
    groups, trains = made.model.layout.groups(), made.method.trains
    trained = {g for g in groups if g in trains or "*" in trains}
    return lines[-1], up, down, seconds, trained <= made.messages.shared_groups


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="methods; all where none is given")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'method':10}  {'accuracy':>8}  {'personal':>8}  {'std':>5}  {'up':>10}  {'down':>10}  {'seconds':>7}",
        flush=True,
    )
    for name in arguments.names or methods.registry:
        line, up, down, seconds, whole = run(name, arguments.rounds)
        assert math.isfinite(line["train_loss"]), f"{name}: train_loss {line['train_loss']}"
        accuracy = f"{line['accuracy']:8.2f}" if whole else f"{'-':>8}"
        personal = f"{line['personal_accuracy']:8.2f}  {line['personal_accuracy_std']:5.1f}"
        print(
            f"{name:10}  {accuracy}  {personal}  {size_text(up):>10}  {size_text(down):>10}  {seconds:7.1f}", flush=True
        )


if __name__ == "__main__":
    main()
