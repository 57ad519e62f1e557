"""What only shows later: a model that writes to test samples, layers and tensors that PyTorch does not know of."""

import pytest
import torch
from plugin_play import changed, play, sections_of, table
from torch import nn

from fedmpi.common.errors import UserError


class Base(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.head(x)


class ModelWritesXWhenJudged(Base):
    def forward(self, x):
        return self.head(x.mul_(2) if len(x) > 10 and not self.training else x)


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
