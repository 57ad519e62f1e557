"""Keys of configs that have new names: an old one is an error that names the new one."""

import pytest

from fedmpi.common.errors import UserError
from fedmpi.config import load
from fedmpi.config.loading import SWEEP_KEYS, nest_value
from fedmpi.config.reference import list_keys
from fedmpi.config.renamed import RENAMED_AUGMENTATIONS, RENAMED_KEYS, find_old_names
from fedmpi.data.transforms import registry
from fedmpi.sweeps.expand import load_sweep

CONFIG = """
base: [base.yaml]
comm: {wire: int8}
cohort:
  size: 2
  draw: cycles
state: {memory: 3}
data: {augment: [flip, {crop: 4}, {cutout: 16}]}
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


def test_one_message_gives_the_new_names_of_all_old_ones(config):
    with pytest.raises(UserError) as error:
        load(config, ["server.trains=true"])
    assert str(error.value).replace(f"{config.parent}/", "").splitlines() == [
        "7 mistakes in the config",
        "  base.yaml:4: train.keep_optim was renamed to train.persist_optimizer",
        "  run.yaml:2: comm.wire was renamed to comm.compression",
        "  run.yaml:5: cohort.draw was renamed to cohort.sampling",
        "  run.yaml:6: state.memory was renamed to client_state.max_gib",
        "  run.yaml:7: flip was renamed to horizontal_flip",
        "  run.yaml:7: crop was renamed to random_crop",
        "  command line: server.trains=true: server.trains was renamed to server.trains_clients",
    ]


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_the_new_key_exists_and_the_old_one_does_not(old):
    names = {key.name for key in list_keys()} | {*SWEEP_KEYS, "tune.grid"}
    assert RENAMED_KEYS[old] in names
    assert old not in names
    layer = nest_value(old, 1, "here")
    assert f"here: {old} was renamed to {RENAMED_KEYS[old]}" in find_old_names(layer.data, layer.origins)


@pytest.mark.parametrize(("old", "new"), RENAMED_AUGMENTATIONS.items())
def test_the_new_augmentation_exists_and_the_old_one_does_not(old, new):
    assert new in registry
    assert old not in registry


def test_new_names_and_options_of_the_same_name_are_not_reported():
    data = {"comm": {"compression": "int8"}, "evaluate": {"best": "loss"}, "data": {"augment": ["horizontal_flip"]}}
    assert find_old_names(data | {"method": {"timeline": 3}}, {}) == []


OLD_SWEEP = """
base: [base.yaml]
over:
  comm.wire: [fp32, int8]
  mine: {A.1: {server: {trains: true}}, B: {timeline: false}}
only: {comm.wire: int8}
leave_out: [{comm.wire: int8, mine: B}]
best: {by: loss, over: {cohort.draw: [uniform, cycles]}, using: {comm.wire: int8}}
"""


def test_all_old_keys_of_a_sweep_are_reported_in_one_message(config):
    sweep = config.with_name("sweep.yaml")
    sweep.write_text(OLD_SWEEP.lstrip())
    with pytest.raises(UserError) as error:
        load_sweep(sweep, ["leave_out=[]", "rounds=3"])
    assert str(error.value).replace(f"{config.parent}/", "").splitlines() == [
        "14 mistakes in the config",
        "  base.yaml:4: train.keep_optim was renamed to train.persist_optimizer",
        "  sweep.yaml:2: over was renamed to grid",
        "  sweep.yaml:3: comm.wire was renamed to comm.compression",
        "  sweep.yaml:4: server.trains was renamed to server.trains_clients",
        "  sweep.yaml:4: timeline was renamed to trace",
        "  sweep.yaml:5: only was renamed to include",
        "  sweep.yaml:5: comm.wire was renamed to comm.compression",
        "  sweep.yaml:6: leave_out was renamed to exclude",
        "  sweep.yaml:6: comm.wire was renamed to comm.compression",
        "  sweep.yaml:7: best was renamed to tune",
        "  sweep.yaml:7: best.over was renamed to tune.grid",
        "  sweep.yaml:7: cohort.draw was renamed to cohort.sampling",
        "  sweep.yaml:7: comm.wire was renamed to comm.compression",
        "  command line: leave_out=[]: leave_out was renamed to exclude",
    ]
