"""Augmentation of training images when a batch is read:  data.augment: [{crop: 4}, flip, {cutout: 16}].

Operations are batched tensor arithmetic. Each uses `columns` uniform random numbers per sample (operation.py). The
numbers of a whole epoch are drawn by a generator seeded from (seed, round, client), so they do not depend on the rank.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "centre_crop": "fedmpi.data.transforms.geometric:CentreCrop",
    "colour": "fedmpi.data.transforms.color:Colour",
    "crop": "fedmpi.data.transforms.geometric:Crop",
    "cutout": "fedmpi.data.transforms.geometric:Cutout",
    "flip": "fedmpi.data.transforms.geometric:Flip",
    "normalise": "fedmpi.data.transforms.color:Normalise",
    "resize": "fedmpi.data.transforms.geometric:Resize",
    "resized_crop": "fedmpi.data.transforms.geometric:ResizedCrop",
    "rotate": "fedmpi.data.transforms.geometric:Rotate",
}

KIND = PluginKind("augmentation", registry, "data.augment")
