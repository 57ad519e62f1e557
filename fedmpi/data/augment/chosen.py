"""data.augment of a config -> operations, and the federation whose pictures go through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.common.text import nearest
from fedmpi.data import augment
from fedmpi.data.augment.look import Look, named
from fedmpi.data.augment.operation import Operation
from fedmpi.data.federated import Federated
from fedmpi.data.pictures import Pictures


def operation(name: str, given: Any, where: str, origins: Mapping[str, str]) -> Operation:
    """One operation. given: its options; None: none; anything else is the option that it is mostly given.

    Raises UserError: an unknown name, unknown or wrong options.
    """
    at = f"{origins['']}: " if origins.get("") else ""
    if name not in augment.registry:
        raise UserError(f"{at}{where}: unknown augmentation '{name}'; {nearest(name, augment.registry)}")
    kind = registry.load(name, augment.registry, "augmentation")
    options = given
    if given is None:
        options = {}
    elif not isinstance(given, dict):
        if not kind.short:
            raise UserError(f"{at}{where}.{name}: {given!r} is not allowed; it takes options by their names")
        options, origins = {kind.short: given}, {**origins, kind.short: origins.get("", "")}
    of = registry.PluginKind("augmentation", augment.registry, f"{where}.{name}")
    made = registry.make(of, registry.Selection(name, options), origins)
    found: Operation = made()
    return found


def augmented(data: Federated, operations: Sequence[Operation]) -> Federated:
    """The federation whose clients train on augmented pictures; tests go through what draws nothing.

    Raises UserError if the operations do not fit the pictures or their targets, or leave them in two sizes.
    """
    if not operations:
        return data
    moving = next((each for each in operations if each.moves_pixels), None)
    if moving and len(data.target_shape) > 1:
        has = " x ".join(map(str, data.target_shape))
        raise UserError(
            f"data.augment: {named(moving)} moves pixels, and the targets of these data are masks ({has}), which would "
            "stay where they are; colour, normalise and cutout go with masks"
        )
    seen: dict[int, Pictures] = {}

    def look(x: Any) -> Pictures:
        if id(x) not in seen:
            own = replace(x.look if isinstance(x, Pictures) else Look(), operations=tuple(operations))
            if isinstance(x, Inputs) or x.dtype != torch.float32:
                what = f"several tensors ({', '.join(x)})" if isinstance(x, Inputs) else f"of {x.dtype}"
                raise UserError(f"data.augment is for pictures, and a sample of these data is {what}; leave it out")
            own.steps  # noqa: B018  whether they stand in an order that makes sense
            stored = x.stored if isinstance(x, Pictures) else x
            if own.bytes and isinstance(stored, Tensor) and stored.is_floating_point():
                pixels = next((each for each in operations if each.on == "unit"), None)
                if pixels:
                    raise UserError(
                        f"data.augment: {named(pixels)} works on pixels in 0..1, and with partition scheme "
                        "feature_noise they lie beyond, by noise in units of the source's own normalisation; leave one "
                        "of the two out"
                    )
            trained, tested = (own.out(tuple(stored.shape[1:]), drawn) for drawn in (True, False))
            if trained != tested:
                sizes = " pixels in training, but at tests ".join(
                    " x ".join(map(str, shape[1:])) for shape in (trained, tested)
                )
                raise UserError(
                    f"data.augment: pictures are {sizes}; what draws nothing is done to both, so "
                    f"end with centre_crop: {min(trained[1:])}, behind a resize where pictures are smaller"
                )
            seen[id(x)] = Pictures(stored, own)
        return seen[id(x)]

    new = data.with_samples(look)
    if seen:
        return replace(new, input_shape=tuple(next(iter(seen.values())).shape[1:]))
    shape = data.input_shape  # all that a rank without clients knows
    return replace(new, input_shape=Look(operations=tuple(operations)).out(shape)) if isinstance(shape, tuple) else new
