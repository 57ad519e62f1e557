"""Augmentation of training images when a batch is read.

    data.augment: [{random_crop: 4}, horizontal_flip, {cutout: 16}]

A transform processes a batch of images at once. It uses a fixed number of uniform random numbers per sample (base.py);
the numbers of an epoch come from a generator seeded with (seed, round, client), so that they do not depend on the rank.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "center_crop": "fedmpi.data.transforms.geometric:CenterCrop",
    "color_jitter": "fedmpi.data.transforms.color:ColorJitter",
    "random_crop": "fedmpi.data.transforms.geometric:RandomCrop",
    "cutout": "fedmpi.data.transforms.geometric:Cutout",
    "horizontal_flip": "fedmpi.data.transforms.geometric:HorizontalFlip",
    "normalize": "fedmpi.data.transforms.color:Normalize",
    "resize": "fedmpi.data.transforms.geometric:Resize",
    "random_resized_crop": "fedmpi.data.transforms.geometric:RandomResizedCrop",
    "random_rotation": "fedmpi.data.transforms.geometric:RandomRotation",
}

KIND = PluginKind("augmentation", registry, "data.augment")
