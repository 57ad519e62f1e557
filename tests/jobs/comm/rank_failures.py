"""Run rounds of messages in which ranks die or freeze.

    python rank_failures.py FOLDER BACKEND ROUNDS PLAN SIZE

This program is also the launcher: the ranks are forks of it, so that they need not import torch. It writes their exit
codes to FOLDER/codes. PLAN (JSON) is a list [{"rank", "round", "where", "do", ...}] of what ranks do to themselves,
once each, and when:

    where    begin | middle (all others wait for the rank's row)
    do       kill | stop | raise | wake (the stopped rank `of`) | join (wait until the woken rank has ended)

In each round rank 0 broadcasts numbers, every rank sends a row to rank 0, which checks it, and all ranks gather 1 KB
from each other. Reports {"event": "regrouped" | "end" | "lost", "alive", ...} in FOLDER/rank.jsonl.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

import fedmpi.comm.backends.torch_dist  # noqa: F401  (before any fork)
from fedmpi.comm import RankLostError, Timeouts, connect, detect
from fedmpi.comm.base import ConnectionLostError
from fedmpi.comm.failures.error_reporter import ErrorReporter
from fedmpi.comm.failures.process_exit import exit_now

N = 300_000  # 1.2 MB: more than sockets buffer
DEADLINE_S = 20


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()  # sockets must close without its help
    folder, backend, rounds, plan = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    launch(int(sys.argv[5]), folder / "codes")
    job = detect(os.environ)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command does
    mine = [step for step in plan if step["rank"] == job.rank]
    timeouts = Timeouts(start=30, round=30)
    error_reporter = ErrorReporter(job, timeouts)
    comm = connect(job, backend, timeouts=timeouts, error_reporter=error_reporter)
    comm.message_timeout_s = next((step["patience"] for step in plan if "patience" in step), 30)
    (folder / f"{job.rank}.pid").write_text(str(os.getpid()))

    def report(event, **more):
        with (folder / f"{job.rank}.jsonl").open("a") as file:
            print(json.dumps({"event": event, "alive": comm.alive, **more}), file=file, flush=True)

    def act(where, t):
        for step in [step for step in mine if step["where"] == where and step["round"] == t]:
            mine.remove(step)
            other = int((folder / f"{step['of']}.pid").read_text()) if "of" in step else 0
            if step["do"] == "raise":
                error_reporter.fail("error: the ninth wave", 2)
            elif step["do"] == "join":
                while process_state(other) not in ("Z", ""):
                    time.sleep(0.05)
            else:
                number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "wake": signal.SIGCONT}[step["do"]]
                os.kill(other or os.getpid(), number)

    def play(t):
        act("begin", t)
        x = torch.full((N,), float(t if comm.rank == 0 else -1))
        comm.broadcast(x)
        assert (x == t).all()
        act("middle", t)
        rows = {rank: torch.zeros(N) for rank in comm.alive} if comm.rank == 0 else {}
        comm.exchange([(0, x + comm.rank)], list(rows.items()))
        assert all((row == t + rank).all() for rank, row in rows.items())
        got = comm.allgather_bytes(f"{comm.rank} in {t}".encode() * 100, DEADLINE_S)
        assert got == [f"{rank} in {t}".encode() * 100 for rank in comm.alive]

    t = 0
    try:
        while t < rounds:
            try:
                play(t)
                t += 1
            except RankLostError as error:
                payloads = comm.regroup(f"{comm.rank} at {t}".encode(), DEADLINE_S)
                report("regrouped", lost=str(error), payloads={r: p.decode() for r, p in payloads.items()})
                t = max(int(payload.split()[2]) for payload in payloads.values())
        comm.close()
        report("end")
        exit_now(0)  # as the command does: a thread that a regroup has left behind may be within torch
    except RankLostError as error:
        report("lost", lost=str(error))
        error_reporter.fail(f"error: {error}", 1, is_consequence=isinstance(error, ConnectionLostError))


def process_state(pid):
    """Return the state of a process: T: stopped; Z: zombie; "": there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def launch(size, codes):
    """Fork `size` ranks and return in each of them; the launcher itself does not return."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    children = []
    for rank in range(size):
        children.append(os.fork())
        if not children[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
            os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            return
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children[1:]]
    if process_state(children[0]) == "T":  # frozen for good
        os.kill(children[0], signal.SIGKILL)
    codes.write_text(json.dumps([os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), *ended]))
    os._exit(0)


if __name__ == "__main__":
    main()
