"""Augmentation of training images when a batch is read:  data.augment: [{crop: 4}, flip, {cutout: 16}].

Operations are batched tensor arithmetic. Each uses `columns` uniform random numbers per sample (operation.py). The
numbers of a whole epoch are drawn by a generator seeded from (seed, round, client), so they do not depend on the rank.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "centre_crop": "fedmpi.data.augment.geometry:CentreCrop",
    "colour": "fedmpi.data.augment.colour:Colour",
    "crop": "fedmpi.data.augment.geometry:Crop",
    "cutout": "fedmpi.data.augment.geometry:Cutout",
    "flip": "fedmpi.data.augment.geometry:Flip",
    "normalise": "fedmpi.data.augment.colour:Normalise",
    "resize": "fedmpi.data.augment.geometry:Resize",
    "resized_crop": "fedmpi.data.augment.geometry:ResizedCrop",
    "rotate": "fedmpi.data.augment.geometry:Rotate",
}

KIND = PluginKind("augmentation", registry, "data.augment")
