"""A client's own model from a run directory gives the metrics that the run recorded for this client."""

import json

import pytest
import torch
from helpers import prepare, small_settings
from safetensors.torch import load_file

import fedmpi
from fedmpi.common.signals import StopRequest
from fedmpi.engine.reporting import OWN, own_parts
from fedmpi.method.base import overrides
from fedmpi.methods import registry
from fedmpi.runtime import build_data, launch
from fedmpi.runtime.record.durable import write_tensors

# What clients keep: parts of the model; models beside the global one.
PARTS = [
    "fedbn",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "local",
    "pfedpara",
    "fedproto",
    "fedpac",
    "fedfomo",
]  # kept by clients
MODELS = ["apfl", "ditto", "fedala", "fedatom", "pfedme", "knnper"]
BEST = {"data": {"validation": 0.2}, "evaluate": {"best": {"metric": "loss", "patience": 1}}}
# Other ways through messages and states; every case has clients that never took part.
WAYS = {
    "whole model, no state": ("fedavg", {}),
    "state that no evaluation reads": ("scaffold", {}),
    "kept optimisers": ("fedper", {"train": {"keep_optim": True}}),
    "int8 down": ("fedper", {"comm": {"wire": {"down": "int8"}}}),
    "topk both ways": ("ditto", {"comm": {"wire": {"up": "topk", "down": "topk"}}}),
    "bf16 downloads of one client": ("fedpac", {"comm": {"wire": {"down": "bf16"}}}),
    "own heads in fast rounds": ("fedatom", {"options": {"period": 2, "pers_head": "local"}}),
    "early stopping": (
        "fedper",
        {"data": {"validation": 0.2}, "evaluate": {"best": {"metric": "loss", "patience": 1}}},
    ),
}


def settings_of(method, output, **changes):
    tree = {"cohort": {"fraction": 0.3}, "rounds": 3, "evaluate": {"protocol": ["personal"]}, "report": False}
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return small_settings(method, "norm", name="run", output=str(output), **tree)


def run(method, output, **changes):
    launch.execute(settings_of(method, output, **changes))
    return output / "run"


def recorded(run_dir):
    """client -> its last line of protocol personal in clients.jsonl."""
    rows = [json.loads(line) for line in (run_dir / "clients.jsonl").read_text().splitlines()]
    return {row["client"]: row for row in rows if row["protocol"] == "personal"}


def some_clients(run_dir):
    """Two clients that took part in the run, in its last round if possible, and one that never did."""
    cohorts = [json.loads(line)["cohort"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = list(dict.fromkeys(k for cohort in reversed(cohorts) for k in cohort))
    return [trained[0], trained[-1], next(k for k in range(7) if k not in trained)]


def assert_as_recorded(run_dir, settings, **how):
    """Accuracy and loss of `fedmpi.load(run_dir, client=k)` on the client's test rows are those of clients.jsonl."""
    test, lines = build_data.partitioned(settings).test, recorded(run_dir)
    for k in some_clients(run_dir):
        module, shard = fedmpi.load(run_dir, trust=True, client=k, **how), test[k]
        assert not module.training
        x, y = shard.x[shard.index], shard.y[shard.index]
        with torch.no_grad():
            outputs = module(x)
        loss = torch.nn.functional.cross_entropy(outputs, y).item()
        assert loss == pytest.approx(lines[k]["loss"], rel=1e-5), k
        assert 100 * (outputs.argmax(1) == y).double().mean().item() == pytest.approx(lines[k]["accuracy"]), k


def test_a_method_with_models_of_the_clients_is_tried_below():
    """Whoever adds such a method adds its name to the lists above."""
    found = set()
    for name in registry:
        made = prepare(small_settings(name, "norm")).made
        if own_parts(made.messages) or any(overrides(made.method, hook) for hook in OWN):
            found.add(name)
    assert found == {*PARTS, *MODELS}


@pytest.mark.parametrize("method", [*PARTS, *MODELS])
def test_a_clients_model_has_the_recorded_metrics(tmp_path, method):
    assert_as_recorded(run(method, tmp_path), settings_of(method, tmp_path))


@pytest.mark.parametrize("case", WAYS)
def test_a_clients_model_whatever_travels_and_stays(tmp_path, case):
    method, changes = WAYS[case]
    assert_as_recorded(run(method, tmp_path, **changes), settings_of(method, tmp_path, **changes))


@pytest.mark.parametrize("method", ["fedper", "apfl", "fedpac"])
def test_a_clients_model_of_a_run_that_was_stopped_and_resumed(tmp_path, method):
    stop = StopRequest()
    stop.after = 2
    assert launch.execute(settings_of(method, tmp_path), stop)[1] == 75
    settings = settings_of(method, tmp_path, checkpoint={"resume": "must"})
    assert launch.execute(settings)[1] == 0
    assert_as_recorded(tmp_path / "run", settings)


def test_the_state_of_a_client_comes_from_the_last_round_that_counted(tmp_path):
    """A row of a later round, which a killed job may leave, is not taken."""
    directory = run("fedper", tmp_path)
    path = max((directory / "state").glob("000*.safetensors"))
    client, made = int(path.name[:6]), int(path.name[7:13])
    row = load_file(path)["row"]
    later = {"client": client, "round": made + 7}
    write_tensors(directory / "state" / f"{client:06}.{made + 7:06}.safetensors", {"row": row + 1}, later)
    assert_as_recorded(directory, settings_of("fedper", tmp_path))
