"""The flat model computes the same bits as an ordinary module, on views of two vectors."""

import hashlib
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.flat.layout import Selection
from fedmpi.flat.model import FlatModel

both = pytest.mark.parametrize("channels_last", [False, True])


class Net(nn.Module):
    """Convolutions (one of them 1 x 1), batch and group normalisation, a head, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1, bias=False), nn.GroupNorm(2, 4)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.still = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("shift", torch.tensor([0.25]))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.scale * self.body(x).mean((2, 3)) + self.shift)


def make_module(seed=0):
    torch.manual_seed(seed)
    return Net()


def make_flat(channels_last, seed=0):
    return FlatModel(make_module(seed), {"head.weight", "head.bias"}, channels_last=channels_last)


def make_data(channels_last, n=12):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 3, 6, 6, generator=g), torch.randint(3, (n,), generator=g)
    return x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format), y


def make_ordinary(channels_last, seed=0):
    plain = make_module(seed)
    return plain.to(memory_format=torch.channels_last) if channels_last else plain


# ---- layout ----
@both
def test_every_parameter_is_a_view_of_w_and_every_float_buffer_of_b(channels_last):
    model, plain = make_flat(channels_last), make_module()
    assert model.w.numel() == sum(p.numel() for p in plain.parameters() if p.requires_grad)
    assert model.b.numel() == 8 + 8 + 1  # running mean, running variance, shift; not the counter, and not the table
    for name, p in plain.named_parameters():
        assert torch.equal(model.module.get_parameter(name), p)
    model.w.mul_(2)
    model.b.add_(1)
    for name, p in plain.named_parameters():
        assert torch.equal(model.module.get_parameter(name), p if name == "still" else 2 * p)
    for name, buffer in plain.named_buffers():
        expected = buffer if name == "table" or "num" in name else buffer + 1
        assert torch.equal(model.module.get_buffer(name), expected)
    with torch.no_grad():
        model.module.head.bias.fill_(9)
    assert (model.w == 9).sum() == 3


def test_segments_are_in_state_dict_order_without_gaps():
    model = make_flat(True)
    segments = model.layout.segments
    assert [s.name for s in segments] == [name for name, p in make_module().named_parameters() if p.requires_grad]
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == model.layout.size
    groups = {s.name: s.group for s in segments}
    assert groups == {
        "scale": "body", "body.0.weight": "body", "body.0.bias": "body", "body.1.weight": "norm",
        "body.1.bias": "norm", "body.2.weight": "body", "body.3.weight": "norm", "body.3.bias": "norm",
        "head.weight": "head", "head.bias": "head",
    }  # fmt: skip
    assert {s.name: s.group for s in model.buffer_layout.segments} == {
        "shift": "body", "body.1.running_mean": "norm", "body.1.running_var": "norm"
    }  # fmt: skip


def test_convolution_weights_are_stored_as_ohwi_blocks():
    """The stride of a kernel's input channel is 1, as channels-last kernels require."""
    model = make_flat(True)
    weight = model.module.body[0].weight  # (8, 3, 3, 3)
    assert weight.stride() == (27, 1, 9, 3)
    s = next(s for s in model.layout.segments if s.name == "body.0.weight")
    stored = model.w[s.start : s.stop]
    assert torch.equal(stored, make_module().body[0].weight.permute(0, 2, 3, 1).flatten())
    assert weight.data_ptr() == stored.data_ptr()


@both
def test_sha256_equals_that_of_the_state_dict(channels_last):
    """It does not depend on the order in the vector: values are little-endian and row-major, tensor by tensor."""
    model, plain = make_flat(channels_last), make_module()
    parameters = dict(plain.named_parameters())
    digest = hashlib.sha256()
    for name, value in plain.state_dict().items():
        if name in parameters and parameters[name].requires_grad:
            digest.update(np.ascontiguousarray(value.numpy()).astype("<f4").tobytes())
    assert model.layout.sha256(model.w) == digest.hexdigest()
    other = model.w.clone()
    other[5] += 1e-6
    assert model.layout.sha256(other) != digest.hexdigest()


# ---- loading, copies ----
@both
def test_load_and_state_dict_are_inverse(channels_last):
    model, target = make_flat(channels_last), make_flat(channels_last, seed=3)
    w, b = target.w.clone(), target.b + 0.5
    stated = model.state_dict(w, b)
    assert list(stated) == list(make_module().state_dict())
    model.load(w)
    assert torch.equal(model.w, w)
    assert torch.equal(model.b, make_flat(channels_last).b)  # load() without buffers keeps them
    model.load(w, b)
    fresh = make_module(8)
    fresh.load_state_dict(stated)
    for name, value in model.module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert torch.equal(stated["head.weight"], make_module(3).head.weight)


def test_counters_are_reset_for_each_client_and_in_files():
    """Otherwise saved models, and batch statistics with momentum=None, would depend on the client trained last."""
    net = make_module()
    net.again = net.body[1]  # one counter under two names
    model = FlatModel(net, channels_last=True)
    counter = model.module.body[1].num_batches_tracked
    model.module.train()(make_data(True)[0])
    stated = model.state_dict(model.w, model.b)
    assert [int(stated[f"{name}.num_batches_tracked"]) for name in ("body.1", "again")] == [0, 0]
    assert stated.keys() == net.state_dict().keys()
    model.load(model.w.clone())  # only weights, as in the middle of a client's round
    assert counter == 1
    model.load(model.w.clone(), model.b.clone())
    assert counter == 0
    model.load(model.w.clone(), model.b.clone(), [torch.tensor(5)])
    assert counter == 5


def test_train_only_trains_these_groups():
    model = make_flat(True)
    wanted = [p.requires_grad for p in model.parameters]
    with model.train_only({"head"}) as parameters:
        assert [p.shape for p in parameters] == [(3, 4), (3,)]
        assert [s.group for s, p in model.segment_parameters if p.requires_grad] == ["head", "head"]
    assert [p.requires_grad for p in model.parameters] == wanted
    with model.train_only({"body", "norm", "head"}) as parameters:
        assert len(parameters) == 10
        assert not model.module.still.requires_grad  # requires_grad of the given module is preserved


# ---- training ----
@pytest.mark.parametrize(
    ("channels_last", "attached", "fused"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_training_equals_that_of_an_ordinary_module(channels_last, attached, fused):
    """The bits are the same with gradients that autograd allocates and with one flat vector as their memory."""
    model, plain = make_flat(channels_last), make_ordinary(channels_last)
    x, y = make_data(channels_last)
    trained = []
    for net in (model.module, plain):
        own = net is model.module
        trained = [p for p in net.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(trained, 0.1, 0.9, weight_decay=1e-2, fused=fused)
        net.train()
        for _ in range(4):
            if own and attached:
                model.attach_gradient().zero_()
            else:
                sgd.zero_grad()
            cross_entropy(net(x), y).backward()
            sgd.step()
        trained.append(net)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], value), name
    assert model.layout.sha256(model.w) != make_flat(channels_last).layout.sha256(make_flat(channels_last).w)


@both
def test_the_flat_gradient_equals_that_of_autograd(channels_last):
    model, plain = make_flat(channels_last), make_ordinary(channels_last)
    x, y = make_data(channels_last)
    g = model.attach_gradient()
    for _ in range(2):
        g.zero_()
        cross_entropy(model.module(x), y).backward()
    cross_entropy(plain(x), y).backward()
    for segment in model.layout.segments:
        theirs = plain.get_parameter(segment.name).grad
        assert torch.equal(segment.view(g), torch.zeros(2, 2) if theirs is None else theirs), segment.name
    assert model.attach_gradient() is g
    model.drop_gradient()
    assert all(p.grad is None for p in model.parameters)
    cross_entropy(model.module(x), y).backward()
    assert torch.equal(model.module.head.weight.grad, plain.head.weight.grad)
    assert model.attach_gradient() is g
    assert not g.any()


# ---- selections ----
def test_selections_of_groups_contain_their_tensors():
    model = make_flat(True)
    layout = model.layout
    one = 1 + 8 * 27 + 8  # scale, first convolution
    # the 16 entries of the normalisation are in between
    assert layout.select({"body"}).ranges == ((0, one), (one + 16, one + 16 + 32))
    assert layout.select({"body", "norm", "head"}).ranges == ((0, layout.size),)
    assert layout.select({"head"}).ranges == ((layout.size - 15, layout.size),)
    assert layout.select(set()).ranges == ()
    norms = layout.sub_layout({"norm"}).named_views(layout.select({"norm"}).take(model.w))
    assert norms.keys() == {f"body.{k}.{kind}" for k in (1, 3) for kind in ("weight", "bias")}
    assert all(torch.equal(value, model.module.get_parameter(name)) for name, value in norms.items())


@pytest.mark.parametrize("ranges", [(), ((0, 10),), ((0, 2), (4, 5), (7, 10))])
def test_selection_put_is_the_inverse_of_take(ranges):
    part, inside = Selection(10, ranges), [i for a, b in ranges for i in range(a, b)]
    assert part.take(torch.arange(10.0)).tolist() == inside
    assert (part.size, part.selects_all) == (len(inside), len(inside) == 10)
    target = torch.full((10,), -1.0)
    part.put(part.take(torch.arange(10.0)), target)
    assert target.tolist() == [float(i) if i in inside else -1.0 for i in range(10)]


# ---- frozen parameters ----
@both
def test_frozen_parameters_are_shared_and_not_in_the_vector(channels_last):
    net = make_module()
    net.body[0].requires_grad_(False)
    model = FlatModel(net, {"head.weight", "head.bias"}, channels_last=channels_last)
    assert set(model.frozen) == {"still", "body.0.weight", "body.0.bias"}
    assert not set(model.frozen) & {s.name for s in model.layout.segments}
    before = {name: p.clone() for name, p in model.frozen.items()}
    twin = model.frozen_copy()
    assert twin.layout == model.layout
    assert all(twin.frozen[name] is p for name, p in model.frozen.items())
    twin.load(torch.zeros_like(model.w), model.b)
    model.load(torch.ones_like(model.w))
    assert all(torch.equal(p, before[name]) for name, p in model.frozen.items())
    x, y = make_data(channels_last)
    assert torch.equal(twin.module(x), torch.zeros(12, 3))
    cross_entropy(model.module(x), y).backward()
    assert all(p.grad is None for p in model.frozen.values())
    saved = model.state_dict(torch.full_like(model.w, 2.0), model.b)
    assert list(saved) == list(make_module().state_dict())
    assert torch.equal(saved["body.0.weight"], before["body.0.weight"])
    assert (saved["head.weight"] == 2).all()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_the_warning_about_recurrent_weights_is_suppressed(layer):
    """It has the text of PyTorch's cuDNN kernels, which would issue it at each call."""
    advice = (
        "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at "
        "every call, possibly greatly increasing memory usage. To compact weights again call flatten_parameters()."
    )
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        FlatModel(nn.Sequential(layer(3, 4)))
        for text in (advice, "another one"):
            warnings.warn(text, stacklevel=1)
    assert [str(each.message) for each in raised] == ["another one"]
