"""comm.compression: what arrives, and how many bytes that takes."""

import warnings

import pytest
import torch
from helpers import norm_net, play, prepare, record, small_settings
from test_transport import on_ranks

from fedmpi.common.errors import UserError
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.flat.formats import BLOCK

each_format = pytest.mark.parametrize("form", ["bf16", "fp16", "int8"])


def wired(method="fedavg", net="norm", form="fp32", **more):
    return small_settings(method, net, comm={"compression": form}, **more)


def naive(form, x):
    """What arrives of x, block by block."""
    if form != "int8":
        return x.to(torch.bfloat16 if form == "bf16" else torch.float16).to(x.dtype)
    out = x.clone()
    for at in range(0, len(x), BLOCK):
        block = x[at : at + BLOCK].double()
        step = block.abs().max() / 127
        out[at : at + BLOCK] = torch.round(block / step) * step if step else 0
    return out


def near(form, found, expected):
    """To the bit; of int8, whose scale is rounded up, to a hundredth of a step (or one step, at the edge of two)."""
    if form != "int8":
        assert torch.equal(found, expected)
        return
    step = float(expected.abs().max()) / 127
    off = (found - expected).abs() / step if step else found
    assert float((off > 0.01).double().mean()) < 0.01
    assert float(off.max()) < 1.01


@each_format
def test_every_upload_is_that_of_the_naive_loop(monkeypatch, form):
    """sent = Q(dw); w moves by the mean of what was sent."""
    seen, honest = [], ClientContext.run_round

    def watched(self, row):
        honest(self, row)
        sent = self.trainer.messages.upload_layout(self.round).packing.views(row).dw.clone()
        seen.append((self.round, self.id, self.w - self.w0, sent))

    monkeypatch.setattr(ClientContext, "run_round", watched)
    it = play(wired(form=form, rounds=3))
    w = it.w0.clone()
    for t in range(3):
        here = [each for each in seen if each[0] == t]
        p = torch.tensor([float(it.fed.trainer.data.train_sizes[k]) for _, k, *_ in here], dtype=torch.float64)
        for *_, dw, sent in here:
            near(form, sent, naive(form, dw))
        w += ((p / p.sum()) @ torch.stack([sent for *_, sent in here]).double()).float()
        assert len(here) == 4
    torch.testing.assert_close(it.w, w, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_bytes_and_parameters(form):
    """One process. Buffers, the word, loss, seconds and flag take 4 bytes each."""
    it = play(wired(form=form, evaluate={"protocol": ["global"]}))
    d, b = len(it.w), len(it.b)
    padded = lambda n: -(-n // 8) * 8  # noqa: E731
    each = padded(4 * (3 + b)) + padded(2 * d if form == "bf16" else d + 4 * -(-d // BLOCK))
    each, sent = 4 * (d + 3 + b) if form == "fp32" else each, 4 * (d + 1 + b)
    for row in it.rows:
        m = len(row["cohort"])
        assert (row["received_bytes"], row["sent_bytes"]) == (m * each, sent + m * each)
        assert (row["up_parameters"], row["down_parameters"]) == (m * (each // 4 - 3), m * (sent // 4 - 1))


@pytest.mark.parametrize("form", ["int8", "bf16"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedpac", "fedbabu"])
def test_the_bits_of_one_process(method, form):
    config = wired(method, "mlp", form, rounds=4)
    done = on_ranks(config, 3)
    assert record(done[0]) == record(play(config))
    sent, received = (sum(getattr(it.fed.comm, f"{way}_bytes") for it in done.values()) for way in ("sent", "received"))
    assert sent == received


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@each_format
def test_what_is_not_finite_is_refused(monkeypatch, form, value):
    """The run ends and names the client, or goes on without it."""
    honest = ClientContext.fit

    def fit(self, *args, **more):
        done = honest(self, *args, **more)
        if (self.round, self.id) == (1, 2):
            self.trainer.model.w_data[7] = value
        return done

    monkeypatch.setattr(ClientContext, "fit", fit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=r"round 1: client 2 sent values that are not finite"):
            play(wired(form=form, cohort={"fraction": 1.0}))
        it = play(wired(form=form, cohort={"fraction": 1.0}, faults={"on_bad_update": "drop"}, rounds=2))
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[], [2]]
    assert bool(it.w.isfinite().all())


@pytest.mark.parametrize(
    ("method", "form", "more", "says"),
    [
        ("fedfomo", "int8", {}, r"comm\.compression: int8 is for changes.*sends none, but theta.*bf16 or fp16"),
        ("fedavg", "bf16", {"server": {"placement": "sharded"}}, r"bf16 is for uploads to one rank.*placement: root"),
        (
            "fedavg",
            "bf16",
            {"model": {"name": "test_compression:half_net"}},
            r"comm\.compression: bf16: .*bfloat16, and only float32",
        ),
    ],
)
def test_refused(method, form, more, says):
    with pytest.raises(UserError, match=says):
        prepare(wired(method, form=form, **more))


def half_net(input_shape, classes):
    return torch.nn.Sequential(Cast(torch.bfloat16), *norm_net(input_shape, classes)).bfloat16()


class Cast(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)
