"""What a model raises or returns is told: its line, what was expected, what came."""

import pytest
import torch
from plugin_play import changed, check_told, play, sections_of, table
from torch import nn

from fedmpi.common.errors import UserError


class Base(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.head(x)


def model_none(input_shape, classes):
    return None


def model_no_parameters(input_shape, classes):
    return nn.ReLU()


def model_frozen(input_shape, classes):
    return Base(input_shape, classes).requires_grad_(False)


def model_mixed(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4).half(), nn.Linear(4, classes))


def model_half(input_shape, classes):
    return Base(input_shape, classes).half()


def model_double(input_shape, classes):
    return Base(input_shape, classes).double()


def model_complex(input_shape, classes):
    return Base(input_shape, classes).to(torch.complex64)


def model_meta(input_shape, classes):
    return Base(input_shape, classes).to("meta")


def model_nan(input_shape, classes):
    net = Base(input_shape, classes)
    nn.init.constant_(net.head.weight, torch.nan)
    return net


class ModelTuple(Base):
    def forward(self, x):
        return self.head(x), x


class ModelDict(Base):
    def forward(self, x):
        return {"logits": self.head(x)}


class ModelFlat(Base):
    def forward(self, x):
        return self.head(x)[:, 0]


class ModelWritesX(Base):
    def forward(self, x):
        return self.head(x.sub_(1))


class ModelWritesXWhenJudged(Base):
    def forward(self, x):
        return self.head(x.mul_(2) if len(x) > 10 and not self.training else x)


class ModelWritesXInTraining(Base):
    def forward(self, x):
        return self.head(x.mul_(2) if self.training else x)


class ModelExits(Base):
    def forward(self, x):
        raise SystemExit(0) if self.training else StopIteration


class ModelNarrow(Base):
    def forward(self, x):
        return self.head(x[:, :1] if self.training else x)


class ModelDetached(Base):
    def forward(self, x):
        return self.head(x).detach()


TOLD = [
    # plug-in, what the message says
    (model_none, "must return a torch.nn.Module with trainable parameters; it returned NoneType"),
    (model_no_parameters, "it returned a module without any"),
    (model_frozen, "it returned a module without any"),
    (model_mixed, "parameters of torch.float16, torch.float32; all that are trained must be of one type"),
    (model_complex, "parameters of torch.complex64"),
    (model_meta, "head.weight is on the device meta"),
    (ModelTuple, r"returns tuple for a batch of 2 samples; it must return one tensor of shape \(2, outputs\)"),
    (ModelDict, "returns dict for a batch of 2 samples"),
    (ModelFlat, r"returns shape \(2,\) for a batch of 2"),
    (ModelWritesX, "writes to its input"),
    (ModelWritesXInTraining, "round 0, client 0: the model .* wrote to its batch, x or y"),
    (ModelExits, "fails on a batch of two samples"),
    (ModelNarrow, "round 0, client 0: ModelNarrow.forward at .*RuntimeError: mat1 and mat2"),
    (ModelDetached, "hook loss returned a loss that depends on no weight"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("model", thing, message, placeless=[ModelDetached])  # its loss is FedAvg's own hook's


def test_values_and_types_that_cannot_be_trained_are_told():
    with pytest.raises(UserError, match=r"model .*: its initial weights hold values that are not finite"):
        play(**sections_of("model", model_nan))
    for model in (model_half, model_double):
        with pytest.raises(UserError, match=r"fails on a batch of two samples .* torch.float32: .*dtype"):
            play(**sections_of("model", model))


def source_at_an_address_of_its_own(root):
    return changed(test_x=table(60)[0][40:].clone())


def test_a_model_that_writes_when_it_is_judged_is_told():
    """Evaluation reads the test samples where they lie."""
    data = sections_of("source", source_at_an_address_of_its_own)
    said = r"after round 0: model ModelWritesXWhenJudged or task Classification wrote to the test samples.*\(Model"
    with pytest.raises(UserError, match=said):
        play(**data, **sections_of("model", ModelWritesXWhenJudged))


class ModelOfAList(Base):
    """Layers that PyTorch does not know of, others that it does, and one that is not to be trained."""

    def __init__(self, *given):
        super().__init__(*given)
        self.blocks = [nn.Linear(4, 4)]
        self.same, self.teacher = [self.head], [nn.Linear(4, 4).requires_grad_(False)]


def test_layers_in_a_plain_list_are_told():
    with pytest.warns(UserWarning, match=r"PyTorch does not know of the layers in blocks, .*nn\.ModuleList") as said:
        play(**sections_of("model", ModelOfAList))
    assert not [each for each in said if "in same" in str(each.message) or "in teacher" in str(each.message)]


class ModelOfPlainTensors(Base):
    def __init__(self, *given):
        super().__init__(*given)
        self.scale, self.shifts = torch.ones(4), [torch.zeros(4)]
        self.register_buffer("known", torch.ones(4), persistent=False)
        self.alias, self.normed = [self.known], nn.utils.weight_norm(nn.Linear(4, 4))


def test_plain_tensors_are_told():
    with pytest.warns(UserWarning, match="plain tensors") as said:
        play(**sections_of("model", ModelOfPlainTensors))
    told = [str(each.message) for each in said if "plain tensors" in str(each.message)]
    assert len(told) == 1
    assert "ModelOfPlainTensors: scale, shifts: plain tensors, which are neither trained nor sent nor saved" in told[0]
