"""`fedmpi sweep`: all runs of a file that are not done yet; `--status`: how far they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fedmpi.common.errors import COME_AGAIN, UserError
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.text import count, headline
from fedmpi.config import Settings
from fedmpi.config.sweep import SEED, Sweep
from fedmpi.runtime.reading import files, sweep_status
from fedmpi.runtime.record import durable, lock
from fedmpi.runtime.record.summary import metric_names
from fedmpi.runtime.sweeping import choosing, pool, progress, slurm
from fedmpi.runtime.sweeping.room import room
from fedmpi.runtime.sweeping.view import View

Say = Callable[[str], None]
Run = tuple[dict[str, str], Settings]


def run(sweep: Sweep, jobs: str, job: pool.Job, say: Say) -> int:
    """Train what is missing. Returns 0 if all runs are done, 75 if a signal came first or another process is at some of
    them; raises UserError at the end if some have failed."""
    every = list(sweep.runs())
    todo = _todo(sweep, every)  # who is refused has written nothing
    make(every[0][1].output)
    _list(sweep, every)
    needs: dict[str, int] = {}
    code = _train(sweep, every, todo, jobs, job, say, needs, "to choose by" if sweep.best else "")
    if code or sweep.best is None:
        return code
    for line in chosen(sweep):
        say(line)
    runs = [(labels, settings) for labels, settings in choosing.final(sweep) if settings is not None]
    more = [each for each in runs if each[1].name not in {settings.name for _, settings in every}]
    todo = _todo(sweep, more)
    _list(sweep, [*every, *more])
    return _train(sweep, more, todo, jobs, job, say, needs, "with what was chosen") if more else 0


def _todo(sweep: Sweep, runs: Sequence[Run]) -> list[Run]:
    return [(labels, each) for labels, each in runs if not progress.over(sweep, progress.now(each))]


def chosen(sweep: Sweep) -> list[str]:
    """What was chosen, written to best.json. Raises UserError where a cell has no choice."""
    found = choosing.choose(sweep)
    assert sweep.best is not None
    place = next(sweep.runs())[1].output
    durable.write(
        place / choosing.FILE, (json.dumps(to_jsonable(choosing.facts(sweep, found)), indent=2) + "\n").encode()
    )
    if without := [choosing.told(each) for each in found.values() if each.chosen is None]:
        raise UserError(f"best: {'; '.join(without)}; the candidates are in {place / choosing.FILE}")
    return [f"chosen by {sweep.best.figure}: {choosing.told(each)}" for each in found.values()]


def _train(
    sweep: Sweep,
    every: Sequence[Run],
    todo: Sequence[Run],
    jobs: str,
    job: pool.Job,
    say: Say,
    needs: dict[str, int],
    what: str = "",
) -> int:
    """todo: those of `every` that are not done; needs: bytes by group, as far as they are known."""
    done = len(every) - len(todo)
    said = f"{count(len(every), 'run')}{what and f' {what}'} in {every[0][1].output}"
    say(said + (f", {done} of them done" if done else ""))
    if not todo:
        return 0
    failed, elsewhere = list[Settings](), list[Settings]()
    settings = [each for _, each in todo]
    view = View(len(todo), len(every), say)

    def tell(one: pool.Ended) -> None:
        state, name = progress.state(one.settings), one.settings.name
        after, took = count(state.rounds, "round"), f"({one.seconds:.0f} s)"
        held, who = lock.look(progress.directory(one.settings))
        others = one.code != 0 and who.get("pid", one.pid) != one.pid
        if one.again:
            view.say(f"{name}: ended after {after}, since memory is short; it goes on later")
        elif state.what == progress.DONE and one.code == 0:
            pool.log(one.settings).unlink(missing_ok=True)  # the run's own log.txt has it
            view.end(name, f"{_headline(one.settings)} {took}")
        elif others and state.what == progress.DONE:
            pool.log(one.settings).unlink(missing_ok=True)
            view.end(name, f"{_headline(one.settings)}, by another process")
        elif others and held:
            elsewhere.append(one.settings)
            view.end(name, f"in use by process {who['pid']} on host {who.get('host')}, and left to it")
        elif one.code == COME_AGAIN:
            view.end(name, f"stopped after {after} {took}")
        elif progress.over(sweep, state):
            view.end(name, f"has diverged, and is not chosen {took}")
        else:
            failed.append(one.settings)
            said = files.last_line(pool.log(one.settings)) or "nothing said"
            view.end(name, f"FAILED (exit code {one.code}): {said} {took}", failed=True)

    try:
        workers = pool.Pool(job, room(jobs, settings, needs), tell, view.look)
        whole = workers.run([(_group(sweep, labels), progress.again(each)) for labels, each in todo])
    finally:
        view.close()
    if failed:
        logs = "\n  ".join(str(pool.log(each)) for each in failed)
        raise UserError(f"{len(failed)} of {count(len(every), 'run')} failed; what they said:\n  {logs}")
    if busy := [each for each in elsewhere if not progress.over(sweep, progress.state(each))]:
        say(f"{count(len(busy), 'run')} in use by another process; when that has ended: {sweep.command}")
        return COME_AGAIN
    if not whole:
        say(f"stopped; go on with: {sweep.command}")
        return COME_AGAIN
    return 0


def _group(sweep: Sweep, labels: dict[str, str]) -> str:
    """Runs that need the same memory: all labels but the seed."""
    return str(sorted((name, label) for name, label in labels.items() if name != SEED))


def status(sweep: Sweep, say: Say) -> int:
    """A line a run that is not done, and how many are. Returns how many are missing."""
    if sweep.best is not None:
        for choice in choosing.choose(sweep).values():
            say(f"chosen by {sweep.best.figure}: {choosing.told(choice)}")
    rows = [(settings, progress.now(settings)) for settings in known(sweep)]
    waiting = slurm.queued(rows[0][0].output)
    for settings, state in rows:
        if job := waiting.get(settings.name):
            say(f"{settings.name}: {state.rounds} of {settings.rounds} rounds, job {job}")
        elif state.what == progress.BEGUN and not progress.over(sweep, state):
            why = f", {state.reason}" if state.reason else ""
            say(f"{settings.name}: {state.rounds} of {settings.rounds} rounds{why}")
        elif state.what == progress.MISSING:
            say(f"{settings.name}: not begun")
    done = sum(progress.over(sweep, state) for _, state in rows)
    say(f"{done} of {count(len(rows), 'run')} done")
    return len(rows) - done + sum(settings is None for _, settings in choosing.final(sweep))


def check(sweep: Sweep, say: Say) -> None:
    """Raises UserError unless all runs are done."""
    if missing := status(sweep, say):
        raise UserError(f"{count(missing, 'run')} missing; go on with: {sweep.command}")
    if sweep.best is not None:
        chosen(sweep)
        _list(sweep, [({}, settings) for settings in known(sweep)])


def known(sweep: Sweep) -> list[Settings]:
    """All runs that are known by now: those to choose by, and those with what was chosen."""
    runs = [settings for _, settings in sweep.runs()]
    if sweep.best is not None:
        runs += [settings for _, settings in choosing.final(sweep) if settings is not None]
    return list({settings.name: settings for settings in runs}.values())


def _headline(settings: Settings) -> str:
    """The first figure of the run's last evaluation."""
    last = progress.state(settings).summary.get("last", {})
    shown = headline(metric_names([last]))
    return f"{shown.replace('_', ' ')} {last[shown]:.4g}" if shown and last.get(shown) is not None else "done"


def _list(sweep: Sweep, runs: Sequence[Run]) -> None:
    """Leave the names of all runs in the sweep's directory, for `fedmpi status` of it."""
    content = sweep_status.record(sweep, [settings.name for _, settings in runs])
    durable.write(runs[0][1].output / sweep_status.LIST, content.encode())


def make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot create {place}: {error.strerror}; choose another output") from error
