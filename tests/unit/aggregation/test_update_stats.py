"""Statistics of a round's updates, compared with loops over the updates."""

import math

import pytest
import torch
from helpers import run_experiment, settings, small_settings

from fedmpi.aggregation.update_stats import GramRecordingUploads, compute_update_stats
from fedmpi.common.errors import UserError
from fedmpi.flat.packing import Views
from fedmpi.method.context import Uploads

EVERYTHING = {"record": {"updates": "gram"}}
KNOWN = {"cosine_mean", "cosine_min", "negative_pairs", "eigenvalues"}


def stats_by_loops(rows, direction):
    """Compute the statistics pair by pair and entry by entry."""
    dot = lambda x, y: math.fsum(a * b for a, b in zip(x, y, strict=True))  # noqa: E731
    rows, direction = [x.tolist() for x in rows], direction.tolist()
    lengths = [math.sqrt(dot(x, x)) for x in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    cosines = [dot(rows[i], rows[j]) / lengths[i] / lengths[j] for i, j in pairs]
    length = math.sqrt(dot(direction, direction))
    return {
        "norms": lengths,
        "direction": length,
        "cosine_mean": sum(cosines) / len(cosines),
        "cosine_min": min(cosines),
        "negative_pairs": sum(c < 0 for c in cosines) / len(cosines),
        # The eigenvalues of K are the squares of the singular values of the rows.
        "eigenvalues": (torch.linalg.svdvals(torch.tensor(rows, dtype=torch.float64)) ** 2).tolist(),
        "to_direction": [dot(x, direction) / n / length for x, n in zip(rows, lengths, strict=True)],
    }


def assert_stats_close(actual, expected, tolerance=2e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def gathered(rows):
    m = len(rows)
    n = torch.arange(1, m + 1, dtype=torch.float64)
    return Uploads(range(3, 3 + m), n, n / n.sum(), Views({"dw": rows}))


ROWS = torch.tensor([[1.0, 2, 0, -1], [0, -3, 1, 0.5], [2, 2, 2, 2]], dtype=torch.float64)


@pytest.mark.parametrize("compute_gram", [False, True])
def test_statistics_of_a_rule_that_computes_the_gram_matrix(compute_gram):
    """Cosines with the direction are recorded only if `compute_gram` is true."""
    up = GramRecordingUploads(gathered(ROWS))
    up.gram()
    direction = torch.tensor([1.0, 0, 0, 3])
    norms = dict(zip(range(3, 6), ROWS.norm(dim=1).tolist(), strict=True)) | {9: 1e9}  # client 9 was refused
    actual, expected = compute_update_stats(up, norms, direction, compute_gram), stats_by_loops(ROWS, direction)
    assert actual.pop("clients") == [3, 4, 5]
    if not compute_gram:
        del expected["to_direction"]
    assert_stats_close(actual, expected)


def test_zero_updates_and_single_updates():
    """Zero updates are not part of any pair; identical updates have rank 1, without noise in the other eigenvalues."""
    rows = torch.tensor([[0.0, 0, 0], [1, 2, 3], [1, 2, 3], [1, 2, 3]]) / 7
    up = GramRecordingUploads(gathered(rows.double()))
    actual = compute_update_stats(up, dict.fromkeys(range(3, 7), 1.0), up.mean(), True)
    assert (actual["cosine_mean"], actual["cosine_min"], actual["negative_pairs"]) == (1, 1, 0)
    assert actual["to_direction"][0] is None
    assert actual["to_direction"][1:] == [1, 1, 1]
    assert actual["eigenvalues"][0] == pytest.approx(3 * 14 / 49, rel=1e-5)
    assert actual["eigenvalues"][1:] == [0, 0, 0]


@pytest.mark.parametrize("method", ["fedavg", "fedld", "fedexp", "scaffold", "fedper"])
def test_statistics_of_a_round_describe_its_uploads(method):
    """They are computed from what the clients sent in the last round and from the step of the global model."""
    it = run_experiment(small_settings(method, "mlp", rounds=2, **EVERYTHING))
    before = run_experiment(small_settings(method, "mlp", rounds=1, **EVERYTHING))
    upload = it.experiment.messages.upload_layout(1)
    step = upload.w.take(it.w.double() - before.w.double())
    assert [row["round"] for row in it.updates] == [0, 1]
    actual = {name: value for name, value in it.updates[-1].items() if name != "round"}
    assert actual.pop("clients") == it.rows[-1]["cohort"]
    assert_stats_close(
        actual, stats_by_loops(it.uploads.dw, step), 1e-3
    )  # the step is a difference of weights in float32


def test_statistics_that_are_recorded_by_default():
    """Norms, and statistics of the Gram matrix if the rule computes it; nothing if no updates are sent or wanted."""
    assert KNOWN.isdisjoint(run_experiment(settings("fedavg", rounds=1)).updates[0])
    assert run_experiment(settings("fedld", rounds=1)).updates[0].keys() >= KNOWN
    assert run_experiment(settings("fedavg", rounds=1, server={"rule": "krum"})).updates[0].keys() >= KNOWN
    assert run_experiment(settings("local", rounds=1)).updates == []
    assert run_experiment(settings("fedld", rounds=1, record={"updates": False})).updates == []


def test_refused_clients_are_not_in_the_statistics():
    bound = sorted(run_experiment(settings("fedavg", rounds=1)).updates[0]["norms"])[-2] * 0.999
    it = run_experiment(settings("fedavg", rounds=1, faults={"on_bad_update": "drop", "max_norm": bound}, **EVERYTHING))
    row, bad = it.updates[0], it.rows[0]["refused"]
    assert len(bad) == 2
    assert len(row["clients"]) == len(row["norms"]) == len(row["to_direction"]) == 2
    assert not {each["client"] for each in bad} & {*row["clients"]}
    assert sum(row["eigenvalues"]) == pytest.approx(sum(n * n for n in row["norms"]), rel=1e-4)  # trace K


def test_a_warning_is_issued_if_there_is_nothing_to_record():
    with pytest.raises(UserError, match=r"record.updates: gram needs updates .* method local sends none; use norms"):
        run_experiment(settings("local", rounds=1, **EVERYTHING))
