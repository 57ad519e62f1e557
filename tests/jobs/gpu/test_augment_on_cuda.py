"""Images and their augmentation are the same on a GPU; pixel moves and normalisation are bitwise identical."""

import pytest
import torch

from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.transforms.color import Normalize
from fedmpi.data.transforms.pipeline import ImagePipeline, make_transform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
EXACT = (
    ("random_crop", 2),
    ("random_crop", {"padding_mode": "reflect", "size": 9}),
    ("horizontal_flip", None),
    ("cutout", 4),
)
CLOSE = (("random_resized_crop", 8), ("random_rotation", 20), ("color_jitter", {"contrast": 0.2}))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("given", [(), *EXACT, EXACT, *CLOSE], ids=str)
def test_rows_are_those_of_a_cpu(given, blocks):
    chain = given if given and isinstance(given[0], tuple) else (given,) if given else ()
    operations = tuple(make_transform(name, options, "data.augment.0", {}) for name, options in chain)
    pipeline = ImagePipeline(bytes=True, normal=Normalize(dataset="cifar10"), transforms=operations)
    stored = torch.randint(0, 256, (50, 3, 12, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows, u = torch.randperm(50)[:20], torch.rand(20, pipeline.random_numbers)
    host, device = (LazyImages(stored, pipeline).to(at, blocks) for at in ("cpu", "cuda"))
    for v in (u, None):
        found = device.read(rows.cuda(), None if v is None else v.cuda())
        wanted = host.read(rows, v)
        assert found.device.type == "cuda"
        if given in CLOSE:
            assert ((found.cpu() - wanted).abs() > 1e-3).float().mean() < 1e-2
        else:
            assert torch.equal(found.cpu(), wanted)
            assert found.stride() == wanted.stride()
