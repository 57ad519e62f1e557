"""The lines that a run prints before and after training, and those of `fedmpi validate`."""

import pytest
import torch
from helpers import ROOT, images, prepare, settings

from fedmpi.comm import Job, detect
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import format_bytes
from fedmpi.config import load
from fedmpi.config.schema import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime.device import choose_device
from fedmpi.runtime.record import console_text
from fedmpi.runtime.record.summary import traffic_of_client
from fedmpi.runtime.validate import validate_settings

HERE = [{"host": "node1", "device": "cpu", "gpu": ""}]


def headlines(made):
    return "\n".join(console_text.describe_run(made, detect({}), "solo", HERE))


def test_classes_are_those_of_a_classification():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    real = split(Dataset(x[:30], x[:30, 0], x[30:], x[30:, 0], 1), "iid", 2, 0)
    text = headlines(prepare(settings(model={"name": "mlp"}, task={"name": "regression"}), real).experiment)
    assert "2 clients with 15 to 15 samples; one process" in text
    assert "class" not in text
    plugin = settings(model={"name": f"{ROOT}/tests/helpers.py:norm_net"})
    text = headlines(prepare(plugin, split(images(), "iid", 2, 0)).experiment)
    assert "2 clients with 85 to 85 samples, 4 classes; one process" in text
    assert text.startswith("run: fedavg on digits, helpers.py:norm_net ")  # not its whole path


def test_traffic_depends_on_the_compression():
    """The printed bytes follow from the format of uploads."""

    def lines(method, wire="fp32"):
        made = prepare(settings(method, "norm", comm={"compression": wire})).experiment
        return console_text.describe_message_sizes(made.messages, 1, made.itemsize), made.model.layout.size

    text = format_bytes
    traffic, d = lines("fedavg")
    assert traffic == f"a client sends {text(4 * (d + 15))} and receives {text(4 * (d + 13))} per round"
    made = prepare(settings("fedavg", "norm")).experiment
    assert traffic_of_client(made.messages, 1, made.itemsize) == {
        "client_sent_bytes": 4 * (d + 15),
        "client_sent_bytes_max": 4 * (d + 15),
        "client_received_bytes": 4 * (d + 13),
    }
    traffic, _ = lines("fedavg", "bf16")
    assert traffic.startswith(f"a client sends {text(64 + -(-2 * d // 8) * 8)} and receives")
    assert traffic.endswith("; uploads in bf16")
    assert lines("fedpac", "int8")[0].endswith("; uploads in int8")


def test_the_description_of_local_training(tmp_path):
    words = ["train.schedule=step", "train.lr=0.01", "train.batch_size=10", "train.warmup_rounds=2"]
    config = load(ROOT / "configs" / "quickstart.yaml", [*words, "rounds=0"])
    text = (
        "4 of 4 clients, 2 epochs in batches of 10; sgd, momentum 0.9, lr 0.01, step, 0.01 in the last round, after a "
        "warm-up of 2 rounds"
    )
    assert console_text.describe_training(config, 4) == text


def facts(*gpus):
    """Return facts about ranks, each on its own host with one of these GPUs ("" for none)."""
    names = {"": "cpu (x86_64)", "c": "NVIDIA A100"}
    return [{"host": f"node{n}", "gpu": gpu, "device": names.get(gpu, "NVIDIA H100")} for n, gpu in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus", "output"),
    [
        (("",), "cpu (x86_64)"),
        (("", "", ""), "cpu (x86_64)"),
        (("a",), "NVIDIA H100"),
        (("a", "a", "a"), "1 x NVIDIA H100"),
        (("", "a", "b", "d", "e"), "4 x NVIDIA H100, rank 0 on cpu"),
        (("", "a", "c", ""), "1 x NVIDIA H100, 1 x NVIDIA A100, ranks 0, 3 on cpu"),
    ],
)
def test_the_devices_of_all_ranks_are_described(gpus, output):
    assert console_text.describe_devices(facts(*gpus)) == output
    made = prepare(settings()).experiment  # of rank 0, on its CPU
    job = Job("torchrun" if gpus[1:] else "single", 0, len(gpus), 0, len(gpus), "node0")
    where = "one process" if len(gpus) == 1 else f"{len(gpus)} ranks (torchrun, gloo)"
    expected = f"; {where}, {output}, 1 thread per rank"
    assert console_text.describe_run(made, job, "gloo", facts(*gpus))[1].endswith(expected)


# ---- ranks without a GPU ----
DRIVER = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.fixture
def broken_driver(monkeypatch):
    def init():
        raise RuntimeError(f"{DRIVER}\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_torch_without_cuda_is_an_error(monkeypatch, broken_driver):
    wanted = settings(compute={"device": "cuda"})
    with pytest.raises(UserError, match=r"has no usable GPU \(The NVIDIA driver on your system is too old \(.*\)\)"):
        choose_device(wanted, detect({}))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"PyTorch .* was built without CUDA; install a wheel with CUDA"):
        choose_device(wanted, detect({}))


@pytest.mark.parametrize(
    ("rank", "size", "trains", "refused"),
    [
        (0, 3, False, None),
        (0, 3, True, r"host here has no usable GPU .*; use auto or cpu, or server.trains_clients: false$"),
        (1, 3, False, r"host here has no usable GPU .*; use auto or cpu$"),
        (0, 1, False, r"host here has no usable GPU .*; use auto or cpu$"),
    ],
)
def test_who_trains_gets_the_gpu_that_the_config_asks_for(broken_driver, rank, size, trains, refused):
    wanted, job = (
        settings(compute={"device": "cuda"}, server={"trains_clients": trains}),
        Job("slurm", rank, size, rank, size, "here"),
    )
    assert choose_device(settings(server={"trains_clients": trains}), job).type == "cpu"  # auto
    if refused:
        with pytest.raises(UserError, match=refused):
            choose_device(wanted, job)
    else:
        assert choose_device(wanted, job).type == "cpu"


# ---- what `fedmpi validate` says of sites ----
# At north 7 are well and 3 ill, at south 3 are well and 7 ill. A fifth of each class of each site, rounded, is the
# test part: of 7 round(1.4) = 1, of 3 round(0.6) = 1.
ROWS = [
    f"{site},{k}.5,{'ill' if k >= limit else 'well'},{int(k >= limit)},{k + 1},{('train', 'validation')[k % 2]}"
    for site, limit in (("north", 7), ("south", 3))
    for k in range(10)
]


def validate_sites(root, label, task="classification", **data):
    (root / "a.csv").write_text("\n".join(["hospital,age,state,event,time,part", *ROWS]) + "\n")
    data |= {"source": "table", "path": "a.csv", "root": root, "site_column": "hospital", "label_column": label}
    data |= {"features": ["age"], "partition": {"scheme": "site"}}
    sections = {"data": data, "model": {"name": "logistic"}, "method": {"name": "fedavg"}, "task": {"name": task}}
    return dict(validate_settings(Settings.model_validate({**sections, "rounds": 1})))


def test_classes_and_events_of_each_site(tmp_path):
    rows = validate_sites(tmp_path, "state")
    assert {name: text for name, text in rows.items() if name.startswith("site ")} == {
        "site north": "8 training samples (ill: 2, well: 6), 2 test samples (ill: 1, well: 1)",
        "site south": "8 training samples (ill: 6, well: 2), 2 test samples (ill: 1, well: 1)",
    }
    rows = validate_sites(tmp_path, ["event", "time"], "survival")
    for site, events in (("north", 3), ("south", 7)):  # of both parts: the test part is drawn whatever the events
        text = rows[f"site {site}"].replace("1 event)", "1 events)")
        train, test = (int(part.split(" events")[0].rsplit("(")[-1]) for part in text.split(", "))
        assert text == f"8 training samples ({train} events), 2 test samples ({test} events)"
        assert train + test == events
