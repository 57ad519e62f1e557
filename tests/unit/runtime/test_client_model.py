"""A client's own model from a run directory gives the metrics that the run recorded for this client."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from helpers import fedmpi as command
from helpers import norm_net, prepare, small_settings
from safetensors.torch import load_file

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.signals import ProcessStartState
from fedmpi.engine.evaluate import PERSONAL_MODEL_HOOKS, personal_groups
from fedmpi.method.base import overrides
from fedmpi.methods import registry
from fedmpi.runtime import build_data
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs.models import ClientPredictor
from fedmpi.runtime.record.atomic_files import serialize_tensors, write_atomically
from fedmpi.runtime.record.saved_model import load_initial_weights

# What clients keep: parts of the model; models beside the global one.
PARTS = ["fedbn", "fedper", "fedrep", "lg_fedavg", "local", "pfedpara", "fedproto", "fedpac", "fedfomo"]
MODELS = ["apfl", "ditto", "fedala", "fedatom_personal", "pfedme", "knnper"]
BEST = {"data": {"validation": 0.2}, "evaluate": {"best": {"metric": "loss", "patience": 1}}}
# Other ways through messages and states; every case has clients that never took part.
WAYS = {
    "whole model, no state": ("fedavg", {}),
    "state that no evaluation reads": ("scaffold", {}),
    "kept optimisers": ("fedper", {"train": {"persist_optimizer": True}}),
    "int8": ("ditto", {"comm": {"compression": "int8"}}),
    "own heads in fast rounds": ("fedatom_personal", {"options": {"period": 2, "personal_head": "local"}}),
    "early stopping": ("fedper", BEST),
    **{method: (method, {}) for method in (*PARTS, *MODELS)},
}


def settings_of(method, output, **changes):
    tree = {"cohort": {"fraction": 0.3}, "rounds": 3, "evaluate": {"protocol": ["personal"]}, "report": False}
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return small_settings(method, "norm", name="run", output=str(output), **tree)


def run(method, output, **changes):
    execute_run(settings_of(method, output, **changes))
    return output / "run"


def recorded(run_dir):
    """Return the last row of protocol personal in clients.jsonl, by client."""
    return {row["client"]: row for row in rows_of(run_dir / "clients.jsonl") if row["protocol"] == "personal"}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def some_clients(run_dir):
    """Return two clients that took part in the run, if possible in its last round, and one that never did."""
    cohorts = [row["cohort"] for row in rows_of(run_dir / "metrics.jsonl")]
    trained = list(dict.fromkeys(k for cohort in reversed(cohorts) for k in cohort))
    return [trained[0], trained[-1], next(k for k in range(7) if k not in trained)]


def assert_as_recorded(run_dir, settings, **how):
    """Check that a loaded client model has the accuracy and loss of clients.jsonl on the client's test rows."""
    test, lines = build_data.build_partitioned_data(settings).test, recorded(run_dir)
    for k in some_clients(run_dir):
        module, shard = fedmpi.load(run_dir, trust=True, client=k, **how), test[k]
        assert not module.training
        x, y = shard.x[shard.index], shard.y[shard.index]
        with torch.no_grad():
            outputs = module(x)
        loss = torch.nn.functional.cross_entropy(outputs, y).item()
        assert loss == pytest.approx(lines[k]["loss"], rel=1e-5), k
        assert 100 * (outputs.argmax(1) == y).double().mean().item() == pytest.approx(lines[k]["accuracy"]), k


def test_every_method_with_client_models_is_in_the_test_cases():
    """A new method of this kind must be added to the lists above."""
    results = set()
    for name in registry:
        made = prepare(small_settings(name, "norm")).experiment
        if personal_groups(made.messages) or any(overrides(made.method, hook) for hook in PERSONAL_MODEL_HOOKS):
            results.add(name)
    assert results == {*PARTS, *MODELS}


@pytest.mark.parametrize("case", WAYS)
def test_a_loaded_client_model_has_the_recorded_metrics(tmp_path, case):
    method, changes = WAYS[case]
    assert_as_recorded(run(method, tmp_path, **changes), settings_of(method, tmp_path, **changes))


@pytest.mark.parametrize("method", ["fedper", "apfl", "fedpac"])
def test_client_models_of_a_resumed_run_have_the_recorded_metrics(tmp_path, method):
    process = ProcessStartState()
    process.stop.max_rounds = 2
    assert execute_run(settings_of(method, tmp_path), process)[1] == 75
    settings = settings_of(method, tmp_path, checkpoint={"resume": "must"})
    assert execute_run(settings)[1] == 0
    assert_as_recorded(tmp_path / "run", settings)


def test_client_state_is_that_of_the_last_completed_round(tmp_path):
    """A row of a later round, which a killed job may leave behind, is ignored."""
    directory = run("fedper", tmp_path)
    path = max((directory / "state").glob("000*.safetensors"))
    client, made = int(path.name[:6]), int(path.name[7:13])
    row = load_file(path)["row"]
    later = {"client": client, "round": made + 7}
    write_atomically(
        directory / "state" / f"{client:06}.{made + 7:06}.safetensors", serialize_tensors({"row": row + 1}, later)
    )
    assert_as_recorded(directory, settings_of("fedper", tmp_path))


# ---- the global model says that clients use others ----
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a function from a method to the run directory of two rounds with all clients."""
    place = tmp_path_factory.mktemp("finished")

    def of(method):
        if not (place / method / "run").exists():
            run(method, place / method, rounds=2, **BEST, cohort={"fraction": 1.0})
        return place / method / "run"

    return of


@pytest.mark.parametrize(
    ("method", "printed"),
    [
        ("fedper", "method fedper keeps parts of the model with each client (head); in the global model they have"),
        ("fedbn", "method fedbn keeps parts of the model with each client (norm); in"),
        ("local", "method local keeps parts of the model with each client (body, head, norm); in"),
        ("ditto", "with method ditto each client has its own model, but this is the global model. For a client's own "),
        ("fedbabu", "method fedbabu fine-tunes the global model on each client's data before the client uses it"),
        ("fedavg", ""),
    ],
)
def test_a_global_model_that_clients_do_not_use_causes_a_notice(finished, tmp_path, method, printed):
    """`fedmpi.load`, `fedmpi export` and init.from show the notice, also if only the model file is left."""
    directory = finished(method)
    for best in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fedmpi.load(directory, trust=True, best=best)
        assert [str(w.message).startswith(printed) for w in caught] == ([True] if printed else [])
    exported = command("export", directory, "--trust", "--out", tmp_path / "m.safetensors")
    assert (exported.returncode != 0) == ("keeps parts" in printed)
    assert printed in exported.stdout + exported.stderr
    assert ("no complete global model to export" in exported.stderr) == ("keeps parts" in printed)
    shutil.copy(directory / "model-best.safetensors", tmp_path / "alone.safetensors")
    for source in (directory, tmp_path / "alone.safetensors"):
        initial = load_initial_weights(norm_net((1, 8, 8), 10), source, strict=True)
        assert any(printed in line for line in initial.lines[1:]) if printed else len(initial.lines) == 1


def test_export_writes_the_clients_own_model(finished, tmp_path):
    directory = finished("fedper")
    result = command("export", directory, "--trust", "--client", 2, "--out", tmp_path / "m.safetensors")
    assert result.returncode == 0, result.stderr
    exported = load_file(tmp_path / "m.safetensors")
    own, other = (fedmpi.load(directory, trust=True, client=k).state_dict() for k in (2, 3))
    assert all(torch.equal(exported[name], value) for name, value in own.items())
    assert not all(torch.equal(exported[name], value) for name, value in other.items())


def test_a_model_that_needs_training_data_cannot_be_exported(finished):
    assert isinstance(fedmpi.load(finished("knnper"), trust=True, client=1), ClientPredictor)
    refused = command("export", finished("knnper"), "--trust", "--client", 1)
    assert refused.returncode == 2
    printed = "method knnper: the outputs of a client's model depend on its training data"
    assert printed in refused.stderr


def test_a_client_model_of_the_best_round_can_be_loaded(finished):
    """One of the two checkpoints on disk is that of the best round."""
    directory = finished("fedper")
    best = json.loads((directory / "summary.json").read_text())["best_model"]["round"]
    lines = rows_of(directory / "clients.jsonl")
    line = next(each for each in lines if (each["round"], each["client"]) == (best, 4))
    shard = build_data.build_partitioned_data(settings_of("fedper", directory, **BEST)).test[4]
    with torch.no_grad():
        outputs = fedmpi.load(directory, trust=True, client=4, best=True)(shard.x[shard.index])
    assert torch.nn.functional.cross_entropy(outputs, shard.y[shard.index]).item() == pytest.approx(line["loss"], 1e-5)


# ---- what is not there ----
@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished("fedper"), tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("client", [7, -1, "north", "1.0", True])
def test_an_unknown_client_is_an_error(finished, client):
    with pytest.raises(UserError, match=r"client: .* does not exist in this run; must be 0 to 6"):
        fedmpi.load(finished("fedper"), trust=True, client=client)


def test_a_missing_state_or_checkpoint_is_an_error(copied):
    for path in (copied / "state").glob("000003.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"state/000003\..*it contains the state of client 3"):
        fedmpi.load(copied, trust=True, client=3)
    assert fedmpi.load(copied, trust=True, client=2)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(
        UserError, match=r"contains the state of server and clients; repeat the run with checkpoint\.every=1"
    ):
        fedmpi.load(copied, trust=True, client=2)
    (copied / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"contains no model\.safetensors: the run has not ended yet"):
        fedmpi.load(copied, trust=True, client=2)


@pytest.mark.parametrize("method", ["fedper", "knnper"])
def test_a_site_model_is_loaded_from_the_files_of_the_site(tmp_path, method):
    """The model of a site needs only the files of that site; if its state is missing, the error says where it is."""
    generator = np.random.default_rng(0)
    for site in ("north", "south"):
        y = np.arange(60) % 4
        x = (generator.normal(size=(60, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32)
        np.savez(tmp_path / f"{site}.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    data = {"source": "npz", "root": str(tmp_path), "path": "{site}.npz"}
    data |= {"silos": ["north", "south"], "partition": None}
    directory = run(method, tmp_path, data=data, cohort={"fraction": 1.0})
    row = recorded(directory)[1]
    (tmp_path / "north.npz").unlink()
    with torch.no_grad():
        outputs = fedmpi.load(directory, trust=True, client="south")(torch.from_numpy(x[40:]))
    loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y[40:]))
    assert loss.item() == pytest.approx(row["loss"], 1e-5)
    if method == "fedper":
        shutil.rmtree(directory / "state" / "south")
        printed = (
            r"/state/south/.*it contains the state of site south \(client 1\).*only in the run directory on the host"
        )
        with pytest.raises(UserError, match=printed):
            fedmpi.load(directory, trust=True, client="south")
