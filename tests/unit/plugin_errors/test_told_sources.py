"""What a source of data raises or returns is told: its line, what was expected, what came."""

import pytest
import torch
from plugin_play import changed, check_told, good_source, table


def source_none(root):
    return None


def source_generator(root):
    yield good_source(root)


def source_tuple(root):
    return table()


def source_numpy(root):
    return changed(train_x=table()[0].numpy())


def source_float64(root):
    return changed(train_x=table()[0].double(), test_x=table()[0].double(), test_y=table()[1])


def source_overflow(root):
    return changed(train_x=(table()[0].double() * 1e300).float())


def source_complex(root):
    return changed(train_x=table()[0] + 0j)


def source_sparse(root):
    return changed(train_x=table()[0].to_sparse())


def source_graph(root):
    return changed(train_x=table()[0].requires_grad_())


def source_meta(root):
    return changed(train_x=table()[0].to("meta"))


def source_empty(root):
    return changed(train_x=torch.empty(0, 3), train_y=torch.empty(0, dtype=torch.int64))


def source_short_labels(root):
    return changed(train_y=table()[1][:-1])


def source_negative(root):
    return changed(train_y=table()[1] - 1)


def source_float_labels(root):
    return changed(train_y=table()[1].float())


def source_exits(root):
    raise SystemExit(0)


def source_stops(root):
    raise StopIteration


def source_memory(root):
    raise MemoryError


TOLD = [
    # plug-in, what the message says
    (source_none, "source source_none returned NoneType; it must return fedmpi.Dataset"),
    (source_generator, "returned generator; it must return fedmpi.Dataset"),
    (source_tuple, "returned tuple"),
    (source_numpy, r"train_x is ndarray; a torch.Tensor is needed: torch.from_numpy"),
    (source_float64, r"train_x is torch.float64; float32 .* is needed"),
    (source_overflow, "train_x holds a value that is not finite, first in row 0"),
    (source_complex, "train_x is a complex tensor"),
    (source_sparse, "train_x is a sparse tensor"),
    (source_graph, "train_x is a tensor that requires gradients"),
    (source_meta, "train_x is a tensor on meta"),
    (source_empty, "there is no training sample"),
    (source_short_labels, r"train_x has 40 rows, train_y the shape \(39,\)"),
    (source_negative, r"train_y holds labels -1..0; with classes=2 0..1 is allowed"),
    (source_float_labels, "a row of train_y is .. float32, one of test_y .. int64; they must agree"),
    (source_exits, "SystemExit: 0"),
    (source_stops, "StopIteration"),
    (source_memory, "MemoryError"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("source", thing, message)
