"""What a plug-in returns, raises or writes to wrongly ends in one UserError: what is expected, what came, and its line.

In the tables below the code of a plug-in stands on one line, in which a bar stands for a new line; what the message
says, a regular expression, stands on the next.
"""

import re

import pytest
from plugin_play import GOOD, run_plugins

from fedmpi.common.errors import UserError

HEAD = """\
from dataclasses import dataclass

import numpy as np
import torch
from plugin_play import TaskBase, changed, good_source, table
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.method import FLAT, SCALAR, SHARED, SlotValues, Slot, Slots, State, SharedParts


class Base(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.head(x)


def later():
    return "mean" if torch.is_grad_enabled() else "none"


"""
METHOD = r"""
def upload(self, k): k.w.zero_(); return SlotValues(), State()
    client 0: a hook of method plugin \(upload\) wrote to client.w, which is read-only
def loss(self, k, x, y): k.label_counts.add_(1); return k.task_loss(k.logits(x), x, y)
    \(loss\) wrote to client.label_counts, which is read-only
def loss(self, k, x, y): return k.task_loss(k.logits(x.mul_(2)), x, y)
    wrote to its batch, x or y
def personal_weights(self, k): return k.received.mul_(2)
    \(personal_weights\) wrote to client.w0 \(client.received\) or client.downloads, which is read-only
def aggregate(self, s, up): up.p.fill_(1); return up.mean('dw'), State()
    round 0: a hook of method plugin \(aggregate\) wrote to updates.p, which is read-only
def loss(self, k, x, y): return k.task_loss(k.logits(x).detach(), x, y)
    round 0, client 0: method plugin, hook loss returned a loss that
def correct_gradient(self, k, g): return torch.ones_like(g, dtype=torch.int64)
    hook correct_gradient returned a tensor of torch.int64
def step(self, k, x, y): return k.grad(x, y).to_sparse()
    hook step returned a sparse_coo tensor
sends = Slots(dw=SHARED, c=SCALAR) | def upload(self, k): return SlotValues(c=np.ones(())), State()
    hook upload: slot 'c' must have shape \(\), but it returned ndarray
client_state = Slots(c=FLAT) | def upload(self, k): return SlotValues(), State(c=k.w.double() + 1e300)
    not finite \(nan or inf, in torch.float32\) in slot 'c'
def predict(self, k): return k.w
    hook predict returned Tensor; it must return None or a function
def predict(self, k): return lambda x: k.logits(x)[:, :1]
    the function from hook predict returned torch.float32 \(\d+, 1\) for \d+
def shared_parts(self, t, rounds): return ('head',)
    hook shared_parts, round 0 returned tuple; it must return SharedParts\(...\)
def prepare_model(self, module, classes): module.head = None
    hook prepare_model must return a torch.nn.Module.*it returned NoneType
def train(self, k): k.fit(groups='hea'); return State()
    client.fit, groups: 'hea' is a string
def train(self, k): k.fit(groups=('haed',)); return State()
    'haed' is not a layout group; those of this model are body, head
def train(self, k): k.fit(epochs=-1); return State()
    client.fit: epochs is -1; it must be an integer >= 0
def train(self, k): k.fit(start=k.w[:1]); return State()
    ValueError: the weights have shape \(1,\), but the model needs \(26,\)
def personal_weights(self, k): return k.replace_group('head', k.w[:1], into=k.received)
    ValueError: expected \d+ entries in the last dimension, but the tensor has shape \(1,\)
def upload(self, k): self.last = k.w; return SlotValues(), State()
    FrozenInstanceError
def loss(self, k, x, y): raise StopIteration
    round 0, client 0: plugin.loss at .*StopIteration
client_state = Slots(c=SCALAR) | def upload(self, k): return SlotValues(), State(c=k.state.d)
    state 'd' is not declared; declared: c
"""
MODEL = r"""
return None
    must return a torch.nn.Module with trainable parameters; it returned NoneType
return nn.ReLU()
    it returned a module without any
return nn.Sequential(nn.Linear(3, 4).half(), nn.Linear(4, classes))
    parameters of torch.float16, torch.float32; all must have the same floating-point type
def forward(self, x): return self.head(x), x
    returns tuple for a batch of 2 samples; it must return one tensor of shape \(2, outputs\)
def forward(self, x): return self.head(x.sub_(1))
    modifies its input in place
def forward(self, x): return self.head(x.mul_(2) if self.training else x)
    round 0, client 0: the model .* wrote to its batch
def forward(self, x): raise SystemExit(0) if self.training else StopIteration
    fails on a batch of two samples
def forward(self, x): return self.head(x[:, :1] if self.training else x)
    round 0, client 0: plugin.forward at .*RuntimeError: mat1 and mat2
"""
TASK = r"""
loss = None
    has no function `loss`
def loss(self, model, x, y): return functional.cross_entropy(model(x), y, reduction=later())
    evaluation after round 0: task plugin: loss returned Tensor of shape \(20,\); it must return a scalar tensor
names = ('round',)
    'round' cannot be the name of a metric; .*names must be distinct strings
names = ('hits', 'hits_std')
    'hits_std' cannot be the name of a metric
def metrics(self, outputs, y): pass
    metrics returned NoneType; it must return a dictionary with one number for each name, \('hits',\)
def metrics(self, outputs, y): return {'hits': 1.0, 'round': 7}
    metrics returned \{'hits': .*'round': .*; it must return a dictionary with one number for each name, \('hits',\)
def metrics(self, outputs, y): return {'hits': torch.ones(2)}
    metrics returned \{'hits': tensor.*; it must return a dictionary with one number for each name
def metrics(self, outputs, y): raise SystemExit(0)
    SystemExit: 0
names = () | def metrics(self, outputs, y): return {}
    it has no metrics; at least one name is needed
names = () | def metrics(self, outputs, y): return {'hits': 1 / 0}
    task plugin: its metrics for two outputs of zeros .*: ZeroDivisionError
"""
SOURCE = r"""
return None
    source plugin returned NoneType; it must return fedmpi.Dataset
return changed(train_x=table()[0].numpy())
    train_x is ndarray; must be a torch.Tensor; use torch.from_numpy
return changed(train_x=table()[0].double(), test_x=table()[0].double(), test_y=table()[1])
    train_x is torch.float64; must be float32
return changed(train_x=table()[0].to_sparse())
    train_x is .*torch.sparse_coo, .*; must be a dense, detached tensor of real numbers on the CPU
return changed(train_y=table()[1][:-1])
    train_x has 40 rows, but there are 39 targets
return changed(train_y=table()[1] - 1)
    train_y contains labels from -1 to 0, but with classes=2 they must be from 0 to 1
return changed(train_y=table()[1].float())
    a row of train_y is .. float32, but a row of test_y is .. int64; .*must be equal
raise SystemExit(0)
    SystemExit: 0
"""
PARTITION = r"""
return None
    returned NoneType; it must return a list of one index array per client
return np.array_split(np.arange(1, len(labels) + 1), clients)
    gave client 2 indices 28..40 of int64; must be an array .n,. of integers in 0..39
return [p[:, None] for p in np.array_split(np.arange(len(labels)), clients)]
    gave client 0 ndarray \(14, 1\) of int64; must be an array .n,. of integers in 0..39
"""
RULE = r"""
return None
    round 0: the server rule returned NoneType; it must return a float tensor of shape \(26,\)
return up.mean('dw')[:1]
    returned shape \(1,\); it must return a float tensor of shape \(26,\)
return up.mean('dw').to_sparse()
    returned a sparse_coo tensor
return up.dw.mul_(2).mean(0)
    the server rule wrote to updates, which is read-only
raise SystemExit(0)
    round 0: plugin at .*SystemExit
"""
BEGIN = {  # of each plug-in's code
    "method": "@dataclass(frozen=True)\nclass plugin(fedmpi.Method):\n    ",
    "task": "class plugin(TaskBase):\n    ",
    "source": "def plugin(root): ",
    "partition": "def plugin(labels, clients, rng): ",
    "rule": "def plugin(up, s): ",
}
FUNCTION, CLASS = "def plugin(input_shape, classes): ", "class plugin(Base):\n    "  # a model's


def table(kind, text):
    """(kind, code of a plug-in, what the message says) of each pair of lines."""
    lines = text.strip().splitlines()
    for code, message in zip(lines[::2], lines[1::2], strict=True):
        yield kind, code.replace(" | ", "\n    "), message.strip()


def run_with(folder, kind, code):
    """A run with one plug-in."""
    begin = BEGIN.get(kind) or (FUNCTION if code.startswith("return") else CLASS)
    (folder / "mine.py").write_text(HEAD + begin + code + "\n")
    name = f"{folder}/mine.py:plugin"
    data = {"source": GOOD, "partition": {"scheme": "iid", "clients": 3}}
    sections = {
        "source": {"data": data | {"source": name}},
        "partition": {"data": data | {"partition": {"scheme": name, "clients": 3}}},
        "rule": {"server": {"rule": {"name": name}}},
    }
    run_plugins(**sections.get(kind, {kind: {"name": name}}))


METHOD_WITHOUT_LINE = r"""
def upolad(self, k): return SlotValues(), State()
    did you mean 'upload'\?
client_sate = Slots(c=FLAT)
    did you mean 'client_state'\?
def loss(self, x, y): return 0
    hook loss must have the arguments \(self, client, x, y\)
correct_gradient = 3
    'correct_gradient' is a hook, so it must be a function, not 3
sends: Slots = Slots(dw=SHARED, c=FLAT)
    'sends' is a declaration, not an option
client_state = Slots(c=5)
    slot 'c' is 5; it must be a Slot
mu: float = 1.0 | equals_fedavg_at = {'nu': 0.0}
    equals_fedavg_at names 'nu', which is not an option of the method
sends = Slots(dw=SHARED, n=FLAT)
    slot name 'n' is not allowed; reserved names: _
sends = Slots(dw=SHARED, c=FLAT)
    round 0, client 0: method plugin, hook upload did not return the declared slot 'c'
def upload(self, k): return SlotValues(extra=k.w), State()
    round 0, client 0: method plugin, hook upload returned slot 'extra', which is not declared; allowed: dw
sends = Slots(dw=SHARED, c=SCALAR) | def upload(self, k): return SlotValues(c=torch.ones(1)), State()
    round 0, client 0: method plugin, hook upload: slot 'c' must have shape \(\), but it returned \(1,\)
client_state = Slots(c=SCALAR) | def train(self, k): return k.state | def upload(self, k): return SlotValues(), k.state
    hook upload returned slot 'c', which an earlier hook has also returned
client_state = Slots(c=FLAT)
    hook train, upload did not return the declared slot 'c'; .* return client\.state
per_client_download = Slots(c=SCALAR)
    round 0, client 0: method plugin, hook download did not return the declared slot 'c'
def train(self, k): k.fit()
    round 0, client 0: method plugin, hook train returned NoneType; it must return SlotValues\(\.\.\.\) or State
def upload(self, k): return SlotValues()
    hook upload returned SlotValues; it must return the pair SlotValues\(\.\.\.\), State\(\.\.\.\)
def aggregate(self, s, up): return up.mean('dw')
    hook aggregate returned Tensor; it must return the pair direction, State\(\.\.\.\)
def aggregate(self, s, up): return up.mean('dw')[:1], State()
    hook aggregate returned shape \(1,\); it must return a tensor \(26,\)
def loss(self, k, x, y): return k.logits(x).square().sum(1)
    round 0, client 0: method plugin, hook loss returned shape \(5,\); it must return a tensor \(\)
def shared_parts(self, t, rounds): return SharedParts(groups=('haed',))
    method plugin, hook shared_parts, round 0: 'haed' is not a layout group; those of this model are body, head
def shared_parts(self, t, rounds): return SharedParts(slots=('dw', 'c'))
    method plugin, hook shared_parts, round 0: slot 'c' is not declared in `sends`
trains = 'head'
    method plugin, trains: 'head' is a string, but must be a tuple of layout groups; write \('head',\)
receives = ('g',)
    receives is \('g',\); it must be a tuple of slots of server_state: none
client_state = dict(c=FLAT)
    client_state is of type dict; it must be Slots\(\.\.\.\)
needs = frozenset({'plain sgd'})
    needs plain sgd, but fedmpi.method defines no such requirement
client_state = Slots(c=Slot(('q',)))
    slot 'c': dimension 'q' is unknown
def aggregate(self, s, up): |     s.log_metrics(loss=1.0) |     return up.mean('dw'), State()
    hook aggregate: log_metrics\(loss=\.\.\.\): 'loss' is already a key in metrics\.jsonl
def train(self, k): |     k.w0.add_(1) |     return State()
    client 0: a hook of method plugin .*wrote to client\.w0 \(client\.received\) or client\.downloads, which
client_state = Slots(c=FLAT) | def train(self, k): |     k.state.c[0] = 1 |     return k.state
    client 0: a hook of method plugin .*wrote to client\.state, which
def aggregate(self, s, up): return s.w.mul_(0), State()
    round 0: a hook of method plugin .*wrote to server\.w, which
server_state = Slots(c=Slot(('d',), start='drawm'))
    has start='drawm'; it must be a number, or the name of .* function f\(self,
server_state = Slots(c=Slot((2,), start='drawn')) | def drawn(self, *_): return torch.ones(3)
    at the start: method plugin, hook drawn: slot 'c' must have shape \(2,\), but it returned \(3,\)
def aggregate(self, s, up): return up.mean('dw').double() * 1e300, State()
    round 0: the server's direction, .* values that are not finite
"""
# The loss that these give is that of FedAvg's own hook.
TASK_WITHOUT_LINE = r"""
def loss(self, model, x, y): model(x)
    hook loss returned NoneType; it must return a tensor \(\)
def loss(self, model, x, y): return functional.cross_entropy(model(x), y, reduction='none')
    hook loss returned shape \(5,\)
"""
MODEL_WITHOUT_LINE = r"""
def forward(self, x): return self.head(x).detach()
    hook loss returned a loss that does not depend on any trained weight
return Base(input_shape, classes).half()
    fails on a batch of two samples, .* torch.float32: .*dtype
def __init__(self, *a): |     super().__init__(*a) |     nn.init.constant_(self.head.weight, torch.nan)
    model.name: .*: initial weights are not finite
"""
LOCATED = {"method": METHOD, "model": MODEL, "task": TASK, "source": SOURCE, "partition": PARTITION, "rule": RULE}
OTHERS = {"method": METHOD_WITHOUT_LINE, "task": TASK_WITHOUT_LINE, "model": MODEL_WITHOUT_LINE}
CASES = [(*case, True) for kind, text in LOCATED.items() for case in table(kind, text)]
CASES += [(*case, False) for kind, text in OTHERS.items() for case in table(kind, text)]


@pytest.mark.parametrize(("kind", "code", "message", "located"), CASES)
def test_message(tmp_path, kind, code, message, located):
    with pytest.raises(UserError, match=message) as caught:
        run_with(tmp_path, kind, code)
    # A source's mistake shows where it makes its Dataset.
    assert not located or re.search(r"/(mine|plugin_play)\.py:\d+", str(caught.value))


def test_samples_that_a_partition_forgets_are_counted(tmp_path):
    with pytest.warns(UserWarning, match="assigns 10 of 40 training samples to no client"):
        run_with(tmp_path, "partition", "return np.array_split(np.arange(30), clients)")
