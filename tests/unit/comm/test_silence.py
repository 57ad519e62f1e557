"""Who is at fault for a silence: not whoever waits himself."""

import threading

import pytest
from torch.distributed import HashStore

from fedmpi.comm.base import Silent
from fedmpi.comm.loss import silence
from fedmpi.comm.loss.alarm import WELL, WHOM
from fedmpi.comm.loss.news import News


def ear(store, rank, awaits):
    news = News(store)
    while (line := news.next()) != WELL:
        assert line.startswith(WHOM)
        silence.answer(line, rank, awaits, store)


@pytest.mark.parametrize(
    ("awaits", "asker", "peers", "expected"),
    [
        ({0: [2], 1: [0]}, 1, [0], [2]),  # rank 0 awaits rank 2, which does not answer
        ({0: [2], 1: [0], 2: []}, 1, [0], [2]),  # it answers, but is busy
        ({0: [2, 3], 1: [0], 2: []}, 1, [0], [3]),  # who does not answer goes before who is busy
        ({0: [1], 1: [0], 2: [3], 3: [0], 4: [2]}, 4, [2], [2]),  # all wait, in a circle: who was silent to the asker
        ({1: [0]}, 1, [0], [0]),
        ({0: [1, 2], 3: [0]}, 0, [1, 2], [1, 2]),
        ({0: [1, 2], 1: [0], 3: [0]}, 0, [1, 2], [2]),  # rank 1 awaits the asker
        ({0: [1], 1: [5], 5: [4], 6: [0]}, 6, [0], [4]),
    ],
)
def test_the_one_at_fault(monkeypatch, awaits, asker, peers, expected):
    monkeypatch.setattr(silence, "FROZEN_S", 1.0)
    store = HashStore()
    ears = [threading.Thread(target=ear, args=(store, *each), daemon=True) for each in awaits.items()]
    for each in ears:
        each.start()
    assert silence.trace(asker, peers, News(store)) == expected
    News(store).add(WELL)
    for each in ears:
        each.join(10)
        assert not each.is_alive()


def test_what_is_said():
    assert str(Silent([2], 3, " (x)")) == "rank 2 is silent: no message from or to it for 3 s (x)"
    assert str(Silent([2, 3], 3, hosts={2: "node5"})).startswith("ranks 2 on node5, 3 are silent: ")
    assert str(Silent({3, 1}, 1800)) == "ranks 1, 3 are silent: no message from or to them for 1800 s"
