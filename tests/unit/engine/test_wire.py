"""comm.wire: what arrives, what stays behind, and how many bytes that takes."""

import warnings

import pytest
import torch
from helpers import norm_net, play, prepare, record, small_settings
from test_transport import on_ranks

from fedmpi.common.errors import UserError
from fedmpi.engine.local.context import ClientContext
from fedmpi.flat.formats import BLOCK

UPS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "topk": {"name": "topk", "fraction": 0.05},
    "int8, nothing kept": {"name": "int8", "feedback": False},
}
up = pytest.mark.parametrize("up", UPS.values(), ids=UPS)


def wired(method="fedavg", net="norm", up="fp32", **more):
    return small_settings(method, net, comm={"wire": {"up": up}}, **more)


def naive(form, x):
    """What arrives of x, entry by entry."""
    name = form if isinstance(form, str) else form["name"]
    if name in ("bf16", "fp16"):
        return x.to(torch.bfloat16 if name == "bf16" else torch.float16).to(x.dtype)
    if name == "topk":
        order = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[: max(1, round(form["fraction"] * len(x)))]
        return torch.stack([x[i] if i in order else x[i] * 0 for i in range(len(x))])
    out = x.clone()
    for at in range(0, len(x), BLOCK):
        block = x[at : at + BLOCK].double()
        step = block.abs().max() / 127
        out[at : at + BLOCK] = torch.round(block / step) * step if step else 0
    return out


def near(form, found, expected):
    """To the bit; of int8, whose scale is rounded up, to a hundredth of a step (or one step, at the edge of two)."""
    if form != "int8" and not (isinstance(form, dict) and form["name"] == "int8"):
        assert torch.equal(found, expected)
        return
    step = float(expected.abs().max()) / 127
    off = (found - expected).abs() / step if step else found
    assert float((off > 0.01).double().mean()) < 0.01
    assert float(off.max()) < 1.01


# ---- up ----
@up
def test_every_upload_is_that_of_the_naive_loop(monkeypatch, up):
    """v = dw + e,  sent = Q(v),  e' = v - sent;  w moves by the mean of what was sent."""
    seen, honest = [], ClientContext.run_round

    def watched(self, row):
        messages = self.trainer.messages
        unsent = messages.client_state.views(self.state_row)
        e = unsent._unsent_dw.clone() if messages.unsent else torch.zeros(len(self.w))
        honest(self, row)
        dw = self.w - self.w0
        sent = messages.upload(self.round).packing.views(row).dw.clone()
        left = unsent._unsent_dw.clone() if messages.unsent else None
        seen.append((self.round, self.id, dw, e, sent, left))

    monkeypatch.setattr(ClientContext, "run_round", watched)
    it = play(wired(up=up, rounds=3))
    w, last = it.w0.clone(), {}
    for t in range(3):
        here = [each for each in seen if each[0] == t]
        p = torch.tensor([float(it.fed.trainer.data.train_sizes[k]) for _, k, *_ in here], dtype=torch.float64)
        for _, k, dw, e, sent, left in here:
            near(up, sent, naive(up, dw + e))
            assert torch.equal(e, last.get(k, torch.zeros_like(e)))
            if left is not None:
                assert torch.equal(left, dw + e - sent)
                last[k] = left
        w += ((p / p.sum()) @ torch.stack([sent for *_, sent, _ in here]).double()).float()
        assert len(here) == 4
    torch.testing.assert_close(it.w, w, atol=1e-6, rtol=0)
    assert bool(last) == (up != UPS["int8, nothing kept"])


# ---- bytes ----
@pytest.mark.parametrize("up", ["fp32", "bf16", "int8", "topk"])
def test_bytes_and_parameters(up):
    """One process. Buffers, the word, loss, seconds and flag take 4 bytes each."""
    it = play(wired(up=UPS.get(up, up), evaluate={"protocol": ["global"]}))
    d, b = len(it.w), len(it.b)
    for row in it.rows:
        m, sent, each = len(row["cohort"]), 4 * (d + 1 + b), _size(up, d, 3 + b)
        assert (row["received_bytes"], row["sent_bytes"]) == (m * each, sent + m * each)
        assert (row["up_parameters"], row["down_parameters"]) == (m * (each // 4 - 3), m * (sent // 4 - 1))


def _size(name, d, others):
    up_to_8 = lambda n: -(-n // 8) * 8  # noqa: E731
    if name == "fp32":
        return 4 * (d + others)
    width = {"int8": d + 4 * -(-d // BLOCK), "topk": 8 * round(0.05 * d)}.get(name, 2 * d)
    return up_to_8(4 * others) + up_to_8(width)


# ---- any number of ranks ----
@pytest.mark.parametrize("up", ["int8", "topk", "bf16"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedpac", "fedbabu"])
def test_the_bits_of_one_process(method, up):
    config = wired(method, "mlp", up, rounds=4)
    alone = record(play(config))
    done = on_ranks(config, 3)
    assert record(done[0]) == alone
    sent, received = (sum(getattr(it.fed.comm, f"{way}_bytes") for it in done.values()) for way in ("sent", "received"))
    assert sent == received


# ---- numbers that are none ----
def spoil(monkeypatch, value, t=1, client=2):
    """One number of one client's model is this after its training in round t."""
    honest = ClientContext.fit

    def fit(self, *args, **more):
        done = honest(self, *args, **more)
        if (self.round, self.id) == (t, client):
            self.trainer.model.live[7] = value
        return done

    monkeypatch.setattr(ClientContext, "fit", fit)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@up
def test_what_is_not_finite_is_refused(monkeypatch, up, value):
    """The run ends and names the client; or goes on without it, and what it keeps is that of before."""
    spoil(monkeypatch, value)
    config = wired(up=up, cohort={"fraction": 1.0}, faults={"on_bad_update": "drop"}, rounds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=r"round 1: client 2 sent values that are not finite"):
            play(wired(up=up, cohort={"fraction": 1.0}))
        it, before = play(config), play(config.model_copy(update={"rounds": 1}))
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[], [2]]
    assert bool(it.w.isfinite().all())
    if it.made.messages.unsent:
        assert torch.equal(it.kept(2)._unsent_dw, before.kept(2)._unsent_dw)
        assert not torch.equal(it.kept(1)._unsent_dw, before.kept(1)._unsent_dw)


# ---- what makes no sense ----
@pytest.mark.parametrize(
    ("method", "more", "says"),
    [
        (
            "fedfomo",
            {"up": "int8"},
            r"comm\.wire\.up: int8 is for changes.*sends none, but theta.*bf16 or fp16",
        ),
        ("fedfomo", {"up": "topk"}, r"comm\.wire\.up: topk is for changes"),
        (
            "fedavg",
            {"up": "bf16", "server": {"placement": "sharded"}},
            r"bf16 is for uploads to one rank.*placement: root",
        ),
        ("fedavg", {"up": "topk", "server": {"rule": "median"}}, r"topk does not go with server\.rule: median"),
        ("fedavg", {"up": "topk", "server": {"rule": "trimmed_mean"}}, r"does not go with server\.rule: trimmed_mean"),
        (
            "fedavg",
            {"up": "bf16", "model": {"name": "test_wire:half_net"}},
            r"comm\.wire: up bf16.*: .*bfloat16, and only float32 and float64 travel",
        ),
    ],
)
def test_refused(method, more, says):
    with pytest.raises(UserError, match=says):
        prepare(wired(method, **more))


def half_net(input_shape, classes):
    return torch.nn.Sequential(Cast(torch.bfloat16), *norm_net(input_shape, classes)).bfloat16()


class Cast(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)
