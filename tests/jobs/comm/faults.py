"""Ranks that misbehave.  python faults.py FOLDER BACKEND FAULT START_S ROUND_S

    silent   nothing happens beyond the start (some ranks are never started)
    hang     rank 1 is there, then sleeps; the others meet, then wait for its message and for it to take theirs
    die      rank 1 leaves without a word while the others wait for its message

Reports {step, lost, seconds} into FOLDER/rank.jsonl; the survivors abort with code 7.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from fedmpi.comm import Lost, Timeouts, connect, detect
from fedmpi.comm.loss.leaving import Process

HANG_S = 5
N = 500_000  # 2 MB: more than sockets and libraries buffer


def main() -> None:
    torch.set_num_threads(1)
    folder, backend, fault, start_s, round_s = sys.argv[1:]
    job = detect(os.environ)

    def attempt(step, call):
        began = time.monotonic()
        lost = ""
        try:
            call()
        except Lost as error:
            lost = str(error)
        with Path(folder, f"{job.rank}.jsonl").open("a") as report:
            print(json.dumps({"step": step, "lost": lost, "seconds": time.monotonic() - began}), file=report)

    made = []
    attempt(
        "connect",
        lambda: made.append(connect(job, backend, timeouts=Timeouts(float(start_s), float(round_s)))),
    )
    if not made:
        sys.exit(1)
    comm = made[0]
    if comm.rank == 1 and fault == "hang":
        time.sleep(HANG_S)
    if comm.rank == 1:
        os._exit(9)
    if fault == "hang":
        attempt("meet", lambda: comm.allgather_bytes(b"", 1))
    if comm.rank == 0:
        attempt("receive", lambda: comm.exchange([], [(1, torch.zeros(N))]))
    else:
        attempt("send", lambda: comm.exchange([(1, torch.zeros(N))], []))
    Process(job).end_job(7)


if __name__ == "__main__":
    main()
