"""comm.compression: the values that arrive, and the number of bytes that are sent."""

import warnings

import pytest
import torch
from helpers import norm_net, prepare, record, run_experiment, small_settings
from test_transport import run_on_ranks

from fedmpi.common.errors import UserError
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.flat.formats import BLOCK

each_format = pytest.mark.parametrize("fmt", ["bf16", "fp16", "int8"])


def compressed_config(method="fedavg", net="norm", fmt="fp32", **more):
    return small_settings(method, net, comm={"compression": fmt}, **more)


def encode_naively(fmt, x):
    """Return the values that arrive for x, computed block by block."""
    if fmt != "int8":
        return x.to(torch.bfloat16 if fmt == "bf16" else torch.float16).to(x.dtype)
    out = x.clone()
    for at in range(0, len(x), BLOCK):
        block = x[at : at + BLOCK].double()
        step = block.abs().max() / 127
        out[at : at + BLOCK] = torch.round(block / step) * step if step else 0
    return out


def assert_encoded_close(fmt, actual, expected):
    """Compare bit for bit; with int8, whose scale is rounded up, up to a hundredth of a step (or one, between two)."""
    if fmt != "int8":
        assert torch.equal(actual, expected)
        return
    step = float(expected.abs().max()) / 127
    off = (actual - expected).abs() / step if step else actual
    assert float((off > 0.01).double().mean()) < 0.01
    assert float(off.max()) < 1.01


@each_format
def test_every_upload_equals_that_of_the_naive_loop(monkeypatch, fmt):
    """sent = Q(dw), and w moves by the mean of what was sent."""
    seen, honest = [], ClientContext.run_round

    def watched(self, row):
        honest(self, row)
        sent = self.trainer.messages.upload_layout(self.round).packing.views(row).dw.clone()
        seen.append((self.round, self.id, self.w - self.w0, sent))

    monkeypatch.setattr(ClientContext, "run_round", watched)
    it = run_experiment(compressed_config(fmt=fmt, rounds=3))
    w = it.w0.clone()
    for t in range(3):
        here = [each for each in seen if each[0] == t]
        p = torch.tensor([float(it.fed.trainer.data.train_sizes[k]) for _, k, *_ in here], dtype=torch.float64)
        for *_, dw, sent in here:
            assert_encoded_close(fmt, sent, encode_naively(fmt, dw))
        w += ((p / p.sum()) @ torch.stack([sent for *_, sent in here]).double()).float()
        assert len(here) == 4
    torch.testing.assert_close(it.w, w, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8"])
def test_counted_bytes_and_parameters(fmt):
    """In one process; buffers, command, loss, seconds and flag take 4 bytes each."""
    it = run_experiment(compressed_config(fmt=fmt, evaluate={"protocol": ["global"]}))
    d, b = len(it.w), len(it.b)
    padded = lambda n: -(-n // 8) * 8  # noqa: E731
    each = padded(4 * (3 + b)) + padded(2 * d if fmt == "bf16" else d + 4 * -(-d // BLOCK))
    each, sent = 4 * (d + 3 + b) if fmt == "fp32" else each, 4 * (d + 1 + b)
    for row in it.rows:
        m = len(row["cohort"])
        assert (row["received_bytes"], row["sent_bytes"]) == (m * each, sent + m * each)
        assert (row["up_parameters"], row["down_parameters"]) == (m * (each // 4 - 3), m * (sent // 4 - 1))


@pytest.mark.parametrize("fmt", ["int8", "bf16"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedpac", "fedbabu"])
def test_ranks_have_the_bits_of_one_process(method, fmt):
    config = compressed_config(method, "mlp", fmt, rounds=4)
    runs = run_on_ranks(config, 3)
    assert record(runs[0]) == record(run_experiment(config))
    sent, received = (sum(getattr(it.fed.comm, f"{way}_bytes") for it in runs.values()) for way in ("sent", "received"))
    assert sent == received


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@each_format
def test_values_that_are_not_finite_are_refused(monkeypatch, fmt, value):
    """The run ends and names the client, or continues without it."""
    honest = ClientContext.fit

    def fit(self, *args, **more):
        fitted = honest(self, *args, **more)
        if (self.round, self.id) == (1, 2):
            self.trainer.model.w_data[7] = value
        return fitted

    monkeypatch.setattr(ClientContext, "fit", fit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=r"round 1: client 2 sent values that are not finite"):
            run_experiment(compressed_config(fmt=fmt, cohort={"fraction": 1.0}))
        it = run_experiment(
            compressed_config(fmt=fmt, cohort={"fraction": 1.0}, faults={"on_bad_update": "drop"}, rounds=2)
        )
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[], [2]]
    assert bool(it.w.isfinite().all())


@pytest.mark.parametrize(
    ("method", "fmt", "more", "says"),
    [
        ("fedfomo", "int8", {}, r"comm\.compression: int8 encodes only .*fedfomo sends theta.*bf16 or fp16"),
        ("fedavg", "bf16", {"server": {"placement": "sharded"}}, r"bf16 encodes uploads to one rank.*placement: root"),
        (
            "fedavg",
            "bf16",
            {"model": {"name": "test_compression:half_net"}},
            r"comm\.compression: bf16 needs float32 or float64 .*bfloat16",
        ),
    ],
)
def test_unsuitable_formats_are_refused(method, fmt, more, says):
    with pytest.raises(UserError, match=says):
        prepare(compressed_config(method, fmt=fmt, **more))


def half_net(input_shape, classes):
    return torch.nn.Sequential(Cast(torch.bfloat16), *norm_net(input_shape, classes)).bfloat16()


class Cast(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)
