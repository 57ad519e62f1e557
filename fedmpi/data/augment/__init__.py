"""What pictures go through between the data set and the model:  data.augment: [{crop: 4}, flip, {cutout: 16}].

Operations are batched tensor arithmetic. What one of them draws for a sample are uniform numbers, `columns` of them
(operation.py), which come for a whole epoch from a generator of (seed, round, client), wherever that one trains.
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
