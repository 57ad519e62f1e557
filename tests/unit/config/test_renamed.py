"""Keys of configs that have new names: an old one is an error that names the new one."""

import pytest

from fedmpi.common.errors import UserError
from fedmpi.config import load
from fedmpi.config.loading import nest_value, read_with_bases
from fedmpi.config.reference import list_keys
from fedmpi.config.renamed import KEYS, VALUES, use_new_names

CONFIG = """
base: [base.yaml]
comm: {wire: int8}
cohort:
  size: 2
  draw: cycles
state: {memory: 3}
train:
  lr: -1
"""
BASE = """
data: {source: digits, partition: {scheme: iid, clients: 4}}
model: {name: mlp}
method: {name: fedavg}
train: {keep_optim: true}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE.lstrip())
    (tmp_path / "run.yaml").write_text(CONFIG.lstrip())
    return tmp_path / "run.yaml"


def test_all_old_keys_are_reported_in_one_message_with_other_mistakes(config):
    with pytest.raises(UserError) as error:
        load(config, ["server.trains=true"])
    assert str(error.value).replace(f"{config.parent}/", "").splitlines() == [
        "7 mistakes in the config",
        "  base.yaml:4: train.keep_optim was renamed to train.persist_optimizer",
        "  run.yaml:2: comm.wire was renamed to comm.compression",
        "  run.yaml:5: cohort.draw was renamed to cohort.sampling",
        "  run.yaml:5: cohort.sampling: cycles was renamed to cyclic",
        "  run.yaml:6: state.memory was renamed to client_state.max_gib",
        "  command line: server.trains=true: server.trains was renamed to server.trains_clients",
        "  run.yaml:8: train.lr: -1 is not allowed; must be: number >= 0",
    ]


def test_new_names_take_the_values_of_the_old_ones(config):
    document = read_with_bases(config)
    assert document.data["cohort"] == {"size": 2, "sampling": "cyclic"}
    assert document.data["client_state"] == {"max_gib": 3}
    assert "state" not in document.data


@pytest.mark.parametrize("old", KEYS)
def test_the_new_key_exists_and_the_old_one_does_not(old):
    names = {key.name for key in list_keys()}
    assert KEYS[old] in names
    assert old not in names
    document = nest_value(old, 1, "here")
    use_new_names(document)
    assert document.problems == [f"here: {old} was renamed to {KEYS[old]}"]
    assert KEYS[old] in document.origins
    assert old not in document.origins


def test_no_old_value_is_allowed():
    kinds = {key.name: key.kind.split(", ") for key in list_keys()}
    assert all(new in kinds[key] and old not in kinds[key] for key in VALUES for old, new in VALUES[key].items())
