"""The source `image_mask`: pictures with their masks, by site, whose numbers become classes and nothing else."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.config.loading import load
from fedmpi.data.preprocessing import PredictionRequest, preparation_from_dict
from fedmpi.data.sources.images.image_mask import image_mask
from fedmpi.data.sources.source_utils import set_ignored_target
from fedmpi.runtime import build_data

SIDE = 6


def picture(k, side=SIDE):
    return np.random.default_rng(k).integers(0, 256, (side, side, 3), dtype=np.uint8)


def mask(k, side=SIDE, values=(0, 1)):
    return np.array(values, dtype=np.uint8)[np.random.default_rng(100 + k).integers(0, len(values), (side, side))]


def write(folder, names, values=(0, 1), first=0, ending="png"):
    for place in ("images", "masks"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(names, first):
        Image.fromarray(picture(k)).save(folder / "images" / f"{name}.png")
        Image.fromarray(mask(k, values=values)).save(folder / "masks" / f"{name}.{ending}")
    return folder


def pairs_of(data):
    """{bytes of the picture: bytes of its mask}"""
    x = torch.cat([(part.all_inputs() * 0.5 + 0.5) * 255 for part in (data.train_x, data.test_x)]).round().byte()
    y = torch.cat([data.train_y, data.test_y])
    return {
        p.permute(1, 2, 0).numpy().tobytes(): m.numpy().astype(np.uint8).tobytes() for p, m in zip(x, y, strict=True)
    }


def expected(numbers):
    return {picture(k).tobytes(): mask(k).tobytes() for k in numbers}


def test_each_image_has_its_own_mask(tmp_path):
    write(tmp_path, [f"scan{k}" for k in range(12)])  # scan10 before scan2 by letters
    data = image_mask(tmp_path, classes=2)
    assert pairs_of(data) == expected(range(12))
    assert (data.train_y.shape, data.test_y.shape, data.train_y.dtype) == ((10, 6, 6), (2, 6, 6), torch.int64)
    assert (data.classes, data.input_shape) == (2, (3, SIDE, SIDE))


def test_sites_and_parts_are_folders(tmp_path):
    write(tmp_path / "north" / "train", "abc")
    write(tmp_path / "north" / "test", "d", first=3)
    write(tmp_path / "south", "abcde", first=4)
    data = image_mask(tmp_path, sites=True, classes=2)
    assert data.site_names == ("north", "south")
    assert (data.site.tolist(), data.test_site.tolist()) == ([0] * 3 + [1] * 4, [0, 1])
    assert pairs_of(data) == expected(range(9))
    alone = image_mask(tmp_path, site="south", classes=2)
    assert pairs_of(alone) == expected(range(4, 9))


def test_a_csv_file_lists_pairs_sites_parts_and_groups(tmp_path):
    write(tmp_path, "abcdef")
    rows = ["image,mask,hospital,part,patient"]
    for n, part, patient in zip("abcdef", ["train", "val", "test"] * 2, "112334", strict=True):
        rows.append(f"images/{n}.png,masks\\{n}.png,{'north' if n < 'd' else 'south'},{part},{patient}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    options = {"path": "pairs.csv", "site_column": "hospital", "split_column": "part", "classes": 2}
    data = image_mask(tmp_path, **options)
    assert (data.site.tolist(), data.test_site.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert pairs_of(data) == expected(range(6))
    assert image_mask(tmp_path, group_column="patient", **options).group.tolist() == [0, 0, 1, 1]
    (tmp_path / "pairs.csv").write_text("\n".join([*rows[:3], rows[1]]))
    with pytest.raises(UserError, match=r"pairs\.csv, line 4: .* is already listed in .*line 2;"):
        image_mask(tmp_path, **options)


@pytest.mark.parametrize(
    "save",
    [
        lambda m, at: Image.fromarray(m).convert("P").save(at),  # a palette, of which the colours do not matter
        lambda m, at: Image.fromarray(np.stack([m] * 3, 2)).save(at),
        lambda m, at: Image.fromarray(m.astype(np.uint16)).save(at),
        lambda m, at: Image.fromarray(np.stack([m, m, m, np.full_like(m, 255)], 2)).save(at),
        lambda m, at: np.save(at.with_suffix(".npy"), m.astype(bool)),
    ],
    ids=["palette", "equal channels", "16 bits", "opaque", "npy"],
)
def test_masks_in_all_file_formats_are_class_numbers(tmp_path, save):
    write(tmp_path, "ab")
    for k, name in enumerate("ab"):
        at = tmp_path / "masks" / f"{name}.png"
        at.unlink()
        save(mask(k), at)
    assert pairs_of(image_mask(tmp_path, classes=2, test_fraction=0.0)) == expected(range(2))


def test_mask_values_become_classes_and_ignored_values_stay(tmp_path):
    write(tmp_path, "abcd", values=(0, 128, 255))
    with set_ignored_target(128):
        data = image_mask(tmp_path, mask_values=(0, 255), test_fraction=0.0)
    raw = np.stack([mask(k, values=(0, 128, 255)) for k in range(4)])
    assert np.array_equal(data.train_y.numpy(), np.select([raw == 255, raw == 128], [1, 128]))
    assert data.classes == 2


def test_a_mask_is_scaled_and_cropped_like_its_image(tmp_path):
    """A square that is white in the picture and 7 in the mask; no other number comes up in between."""
    for k, place in enumerate(("images", "masks")):
        (tmp_path / place).mkdir()
        array = np.zeros((40, 60), np.uint8)
        array[12:32, 22:42] = (255, 7)[k]
        Image.fromarray(array).save(tmp_path / place / "a.png")
    data = image_mask(tmp_path, size=10, channels=1, mask_values=(0, 7), test_fraction=0.0)
    white = data.train_x.all_inputs()[0, 0] > 0
    assert int(white.sum()) == 25  # a quarter of the part that is left
    assert torch.equal(data.train_y[0] == 1, white)


def other(tmp_path, place, array):
    Image.fromarray(array).save(tmp_path / place)


@pytest.mark.parametrize(
    ("change", "options", "pattern"),
    [
        (lambda p: (p / "masks" / "b.png").unlink(), {}, r"images/b\.png has no mask .*masks/b"),
        (
            lambda p: other(p, "masks/b.png", np.zeros((3, 6), np.uint8)),
            {},
            r"b\.png .* different sizes, 6 x 6 and 3 x 6",
        ),
        (
            lambda p: other(p, "masks/b.png", 2 * mask(1)),
            {},
            r"b\.png contains 2; allowed: 0, 1; set data\.classes .*task\.ig",
        ),
        (
            lambda p: other(p, "masks/a.png", 255 * mask(0)),
            {"classes": None},
            r"a\.png contains 0, 255; allowed: none; set data\.classes",
        ),
        (lambda p: (p / "masks" / "b.png").write_bytes(b"no picture"), {}, r"b\.png cannot be read as a mask"),
        (lambda p: None, {"image_pattern": "scans/*"}, r"masks/a\.png has no image .*scans/a"),
    ],
)
def test_an_invalid_pair_is_reported_with_its_file(tmp_path, change, options, pattern):
    write(tmp_path, "ab")
    change(tmp_path)
    with pytest.raises(UserError, match=pattern):
        image_mask(tmp_path, **{"classes": 2, **options})


def test_the_source_keeps_the_ignored_target_of_the_task(tmp_path):
    write(tmp_path / "d", "abcdef", values=(0, 1, 255))
    (tmp_path / "run.yaml").write_text(
        f"data: {{source: image_mask, root: {tmp_path}, path: d, classes: 2, partition: {{scheme: iid, clients: 2}}}}\n"
        "model: {name: unet, width: 8, levels: 1}\nmethod: {name: fedavg}\nrounds: 1\n"
        "task: {name: segmentation, ignore: 255}\n"
    )
    masks = build_data.build_partitioned_data(load(tmp_path / "run.yaml"))
    assert masks.train[0].y.unique().tolist() == [0, 1, 255]
    with pytest.raises(UserError, match=r"contains 255; allowed: 0, 1"):
        build_data.build_partitioned_data(load(tmp_path / "run.yaml", ["task.ignore=null"]))


def test_new_images_are_prepared_like_training_images(tmp_path):
    """With the options of the training, which a run stores as JSON."""
    write(tmp_path, "ab")
    for k, name in enumerate("ab"):
        Image.fromarray(picture(k)[..., 0].astype(np.uint16) * 9).save(tmp_path / "images" / f"{name}.png")
    data = image_mask(tmp_path, classes=2, channels=1, pixel_range=(100.0, 2000.0), size=4, test_fraction=0.0)
    stored = preparation_from_dict(json.loads(json.dumps(data.preparation.to_dict())))
    new = stored.read_requested_rows(PredictionRequest(tmp_path / "images"))
    assert torch.equal(new.x.all_inputs(), data.train_x.all_inputs())
    assert new.ids["file"].tolist() == ["a.png", "b.png"]
