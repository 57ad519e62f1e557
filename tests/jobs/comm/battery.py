"""Checks that every communication back end must pass.

Run once per rank: python battery.py FOLDER BACKEND

Each check runs on all ranks of one communicator. Entry i of a message from rank a to rank b is 1000 a + 100 b + i, so
that a wrong peer, order or length is detected. Reports {check, error} in FOLDER/rank.jsonl.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from fedmpi.comm import Timeouts, connect, detect

TYPES = (torch.float32, torch.float64, torch.uint8, torch.int64, torch.bfloat16)


def message(source, target, n, dtype=torch.float32):
    return (torch.arange(n) + 1000 * source + 100 * target).to(dtype)


def check_broadcast_of_every_type(comm):
    for dtype in TYPES:
        x = message(comm.rank, 0, 1001, dtype)
        comm.broadcast(x)
        assert torch.equal(x, message(0, 0, 1001, dtype)), dtype


def check_ring(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for dtype in TYPES:
        got = torch.zeros(17, dtype=dtype)
        comm.exchange([(right, message(comm.rank, right, 17, dtype))], [(left, got)])
        assert torch.equal(got, message(left, comm.rank, 17, dtype)), dtype


def check_gather_rows_in_place(comm):
    """Rank 0 receives each row of a matrix into the row's own memory; its own row is a copy."""
    rows = torch.zeros(comm.size, 1000)
    comm.exchange(
        [(0, message(comm.rank, 0, 1000))], [(r, rows[r]) for r in range(comm.size)] if comm.rank == 0 else []
    )
    if comm.rank == 0:
        assert torch.equal(rows, torch.stack([message(r, 0, 1000) for r in range(comm.size)]))


def check_exchange_of_unequal_columns(comm):
    """A message from a to b has a + 2 b numbers; that from 0 to 0 is empty."""
    got = [torch.zeros(a + 2 * comm.rank) for a in range(comm.size)]
    out = [(b, message(comm.rank, b, comm.rank + 2 * b)) for b in range(comm.size)]
    comm.exchange(out, list(enumerate(got)))
    for a, x in enumerate(got):
        assert torch.equal(x, message(a, comm.rank, a + 2 * comm.rank)), a


def check_large_messages_both_ways(comm):
    """All pairs exchange 2 MB, too much to be buffered: all messages must be posted before any is waited for."""
    others = [r for r in range(comm.size) if r != comm.rank]
    got = {r: torch.zeros(500_000) for r in others}
    comm.exchange([(r, message(comm.rank, r, 500_000)) for r in others], list(got.items()))
    for r, x in got.items():
        assert torch.equal(x, message(r, comm.rank, 500_000)), r


def check_order_within_a_pair(comm):
    """Each rank sends five messages of different lengths and types to the next one, the largest first."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    kinds = list(zip((70_000, 3, 50, 1, 0), TYPES, strict=True))
    got = [torch.zeros(n, dtype=dtype) for n, dtype in kinds]
    comm.exchange([(right, message(comm.rank, right, *kind)) for kind in kinds], [(left, x) for x in got])
    for x, kind in zip(got, kinds, strict=True):
        assert torch.equal(x, message(left, comm.rank, *kind)), kind


def check_order_across_calls(comm):
    """Rank 0 is one call behind all others; messages still arrive in the order in which they were sent."""
    got = torch.zeros(2, 4)
    for call in range(2):
        outgoing = [(0, message(comm.rank, call, 4))] if comm.rank == comm.size - 1 else []
        comm.exchange(outgoing, [(comm.size - 1, got[call])] if comm.rank == 0 else [])
    if comm.rank == 0:
        assert torch.equal(got, torch.stack([message(comm.size - 1, call, 4) for call in range(2)]))


def check_splitting(comm):
    """A message of 100 numbers that is split into pieces of 7 arrives unchanged."""
    comm.max_elements = 7
    check_ring(comm)
    check_order_within_a_pair(comm)
    x = message(comm.rank, 0, 100)
    comm.broadcast(x)
    assert torch.equal(x, message(0, 0, 100))
    del comm.max_elements


def check_byte_counts(comm):
    """Byte counts are those of the tensors.

    A broadcast of 10 float64 counts 80 bytes per other rank (once for a single rank); 3 + 4 float32 in a ring count 28.
    """
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = comm.sent_bytes, comm.received_bytes
    comm.broadcast(torch.zeros(10, dtype=torch.float64))
    comm.exchange([(right, torch.zeros(3)), (right, torch.zeros(4))], [(left, torch.zeros(3)), (left, torch.zeros(4))])
    comm.allgather_bytes(b"control traffic does not count", 30)
    assert comm.sent_bytes - sent == 28 + (80 * max(1, comm.size - 1) if comm.rank == 0 else 0)
    assert comm.received_bytes - received == 28 + (80 if comm.rank > 0 else 0)


def check_allgather_bytes(comm):
    def payload(rank, length):
        return bytes((rank + i) % 256 for i in range(length))

    for length in (0, 1, 4096):
        assert comm.allgather_bytes(payload(comm.rank, length), 30) == [
            payload(rank, length) for rank in range(comm.size)
        ]


def check_invalid_messages(comm):
    """Programming errors raise the same error on all ranks before anything is sent."""
    wrong = [torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(3, device="meta")]
    calls = [lambda x=x: comm.broadcast(x) for x in wrong]
    calls += [lambda: comm.exchange([(comm.size, torch.zeros(1))], []), lambda: comm.allgather_bytes(b"x" * 4097, 1)]
    for i, call in enumerate(calls):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"call {i} was accepted")


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


def run(comm, folder) -> None:
    torch.set_default_device(comm.device)  # where messages must live
    with Path(folder, f"{comm.rank}.jsonl").open("w") as report:
        for name, check in CHECKS.items():
            error = ""
            try:
                check(comm)
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"check": name, "error": error, "class": type(comm).__name__}), file=report, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    interface = sys.argv[3] if len(sys.argv) > 3 else None
    comm = connect(detect(os.environ), sys.argv[2], timeouts=Timeouts(start=30, round=20), interface=interface)
    run(comm, sys.argv[1])
    comm.close()


if __name__ == "__main__":
    main()
