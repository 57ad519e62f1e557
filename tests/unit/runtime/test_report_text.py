"""What a run says before and after training, and `fedmpi validate` instead of it: true, and all that one must know."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import ROOT, fedmpi, images, play, prepare, settings, small_settings

from fedmpi.comm import Job, detect
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import size_text
from fedmpi.config.schema import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime.device import pick_device, why_no_gpu
from fedmpi.runtime.record import report_text
from fedmpi.runtime.run import exchange_facts, unused_gpu
from fedmpi.runtime.validate import validate_settings

HERE = [{"host": "node1", "device": "cpu", "gpu": ""}]


def headlines(made):
    return "\n".join(report_text.headlines(made, detect({}), "solo", HERE))


def test_classes_are_those_of_a_classification():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    real = split(Dataset(x[:30], x[:30, 0], x[30:], x[30:, 0], 1), "iid", 2, 0)
    text = headlines(prepare(settings(model={"name": "mlp"}, task={"name": "regression"}), real).made)
    assert "2 clients with 15 to 15 samples; one process" in text
    assert "class" not in text
    plugin = settings(model={"name": f"{ROOT}/tests/helpers.py:norm_net"})
    text = headlines(prepare(plugin, split(images(), "iid", 2, 0)).made)
    assert "2 clients with 85 to 85 samples, 4 classes; one process" in text
    assert text.startswith("run: fedavg on digits, helpers.py:norm_net ")  # not its whole path


def test_of_nothing_there_is_no_share():
    """Local training sends nothing; a format may fill up to a whole word all the same."""
    it = play(small_settings("local", rounds=1))
    row = {"cohort": [0], "up_parameters": 2, "down_parameters": 2}
    assert report_text.total_traffic([row], it.made.messages) == "clients sent 2 and received 2 parameters"


def test_formats_and_what_they_cost():
    """What travels how; bytes of a message are those of its format; who keeps and moves what is left out."""

    def said(method, ranks=1, placement="balanced", **wire):
        made = prepare(settings(method, "norm", comm={"wire": wire}, cohort={"placement": placement})).made
        return (
            report_text.describe_wire(made, ranks),
            report_text.describe_traffic(made.messages, 1, made.itemsize),
            made,
        )

    text = size_text
    nothing, before, made = said("fedavg")
    d = made.model.layout.size
    assert (nothing, before) == ([], f"a client sends {text(4 * (d + 15))} and receives {text(4 * (d + 13))} a round")
    keeps = f"what a format leaves out of an upload, {text(4 * d)}, a client keeps for its next"
    lines, after, _ = said("fedavg", up="bf16")
    assert lines == ["wire: up bf16 (dw)", keeps]
    assert after.startswith(f"a client sends {text(64 + -(-2 * d // 8) * 8)} and receives")
    lines, _, _ = said("fedpac", ranks=3, up={"name": "topk", "fraction": 0.1}, down="bf16")
    assert lines[0] == "wire: up topk of 0.1 (dw; whole: head), down bf16 of the model"
    assert lines[1].endswith("keeps for its next, and moves it between ranks (cohort.placement: pinned does not)")
    assert said("fedavg", ranks=3, placement="pinned", up="int8")[0][1] == keeps
    assert said("fedavg", up={"name": "int8", "feedback": False}, down="fp16")[0] == [
        "wire: up int8 (dw), down fp16 of the model"
    ]


def test_a_run_says_what_its_fragments_bring(tmp_path):
    path, fragment = tmp_path / "mine.yaml", tmp_path / "paper.yaml"
    fragment.write_text(
        "method: {name: fedatom_personal}\ncohort: {fraction: 0.1}\n"
        "train: {epochs: 10, batch_size: 10, lr: 0.01, momentum: 0.9}\n"
    )
    base = [str(ROOT / "configs" / "quickstart.yaml"), str(fragment)]
    path.write_text(
        yaml.safe_dump(
            {"base": base, "rounds": 4, "model": {"name": "mcmahan_cnn"}, "train": {"schedule": "step", "epochs": 1}}
        )
    )
    done = fedmpi("run", path, f"output={tmp_path}", "rounds=0", "train.warmup_rounds=2", "cohort.fraction=1")
    assert done.returncode == 0, done.stderr
    assert "0 rounds with 4 of 4 clients, 1 epoch in batches of 10; lr 0.01, step, 0.01 at last, after a" in done.stdout
    brought = "train.batch_size 10, train.lr 0.01, train.momentum 0.9"
    assert f"from {tmp_path}/paper.yaml: {brought}\n" in done.stdout


def facts(*gpus, no_gpu=""):
    """About ranks, each on a host of its own, with these GPUs; "" for none."""
    names = {"": "cpu (x86_64)", "c": "NVIDIA A100"}
    return [
        {"host": f"node{n}", "gpu": gpu, "device": names.get(gpu, "NVIDIA H100"), "no_gpu": "" if gpu else no_gpu}
        for n, gpu in enumerate(gpus)
    ]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (("",), "cpu (x86_64)"),
        (("", "", ""), "cpu (x86_64)"),
        (("a",), "NVIDIA H100"),
        (("a", "a", "a"), "1 x NVIDIA H100"),
        (("", "a", "b", "d", "e"), "4 x NVIDIA H100, rank 0 on cpu"),
        (("", "a", "c", ""), "1 x NVIDIA H100, 1 x NVIDIA A100, ranks 0, 3 on cpu"),
    ],
)
def test_the_devices_of_all_ranks_are_named(gpus, said):
    assert report_text.describe_devices(facts(*gpus)) == said
    made = prepare(settings()).made  # of rank 0, on its CPU
    job = Job("torchrun" if gpus[1:] else "single", 0, len(gpus), 0, len(gpus), "node0")
    where = "one process" if len(gpus) == 1 else f"{len(gpus)} ranks (torchrun, gloo)"
    assert report_text.headlines(made, job, "gloo", facts(*gpus))[1].endswith(f"; {where}, {said}, 1 thread a rank")


# ---- ranks without a GPU ----
DRIVER = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.fixture
def broken_driver(monkeypatch):
    def init():
        raise RuntimeError(f"{DRIVER}\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_torch_without_cuda_is_named(monkeypatch, broken_driver):
    wanted = settings(compute={"device": "cuda"})
    with pytest.raises(UserError, match=r"has no usable GPU \(The NVIDIA driver on your system is too old \(.*\)\)"):
        pick_device(wanted, detect({}))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"this PyTorch \(.*\) was built without CUDA; install a wheel with it"):
        pick_device(wanted, detect({}))


@pytest.mark.parametrize(
    ("rank", "size", "trains", "refused"),
    [
        (0, 3, False, None),
        (0, 3, True, r"host here has no usable GPU .*; use auto or cpu, or server.trains: false$"),
        (1, 3, False, r"host here has no usable GPU .*; use auto or cpu$"),
        (0, 1, False, r"host here has no usable GPU .*; use auto or cpu$"),
    ],
)
def test_who_trains_gets_the_gpu_that_the_config_asks_for(broken_driver, rank, size, trains, refused):
    wanted, job = (
        settings(compute={"device": "cuda"}, server={"trains": trains}),
        Job("slurm", rank, size, rank, size, "here"),
    )
    assert pick_device(settings(server={"trains": trains}), job).type == "cpu"  # auto
    if refused:
        with pytest.raises(UserError, match=refused):
            pick_device(wanted, job)
    else:
        assert pick_device(wanted, job).type == "cpu"


@pytest.mark.parametrize(
    ("gpus", "server_trains", "slow"),
    [
        (("a", "b", ""), False, "rank 2 trains"),
        (("a", "", ""), False, "ranks 1, 2 train"),
        (("", "a", "b"), True, "rank 0 trains"),
        (("", "a", "b"), False, None),  # a server needs no GPU
        (("", "", ""), False, None),
    ],
)
def test_a_rank_that_trains_on_its_cpu_beside_gpus_is_named_with_the_reason(
    monkeypatch, broken_driver, gpus, server_trains, slow
):
    """Once, by rank 0, whatever rank finds it."""
    made = prepare(settings(server={"trains": server_trains})).made
    for rank in range(len(gpus)):
        others = facts(*gpus, no_gpu=why_no_gpu("node"))
        job = Job("slurm", rank, len(gpus), 0, 1, f"node{rank}")

        def allgather(payload, timeout_s, others=others):
            mine = json.loads(payload)
            assert DRIVER in mine["no_gpu"]
            return [json.dumps({**mine, **each}).encode() for each in others]

        comm = SimpleNamespace(
            rank=rank, size=len(gpus), device=torch.device("cpu"), can_regroup="", allgather_bytes=allgather
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = SimpleNamespace(experiment=made, job=job, comm=comm, device=torch.device("cpu"))
            found = exchange_facts(run)
        assert [each.keys() for each in found] == [{"host", "device", "gpu", "no_regroup"}] * len(gpus)
        said = [str(each.message) for each in told]
        assert len(said) == (rank == 0 and slow is not None)
        for text in said:
            assert f"compute.device: auto: {slow} on the CPU while others have GPUs" in text
            assert f": host node has no usable GPU ({DRIVER}). " in text


@pytest.mark.parametrize(
    ("size", "trains", "warns"), [(2, False, True), (8, False, True), (9, False, False), (4, True, False)]
)
def test_a_gpu_on_which_rank_0_trains_nobody(size, trains, warns):
    text = unused_gpu(small_settings("fedavg", "mlp", server={"trains": trains}), size)
    assert bool(text) == warns
    assert not warns or text.startswith(f"rank 0 occupies one of {size} GPUs, and trains nobody on it")
    assert not warns or "server.trains=true" in text


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


@pytest.mark.filterwarnings("ignore:data. feature 'age' alone separates")
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


@pytest.mark.filterwarnings("ignore:data. feature 'age' alone separates")
def test_an_empty_test_part_of_a_split_column_has_a_remedy(tmp_path):
    with pytest.warns(UserWarning, match=r"the test set is empty.*no row is part: test.*data\.test_fraction"):
        rows = validate_sites(tmp_path, "state", split_column="part")
    assert rows["test"].startswith("0 samples;")
