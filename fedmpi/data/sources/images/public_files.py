"""Public data sets of image files: CINIC-10, Tiny-ImageNet, PACS, Office-Home, HAM10000, Retina and COVID-FL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import shorten_repr
from fedmpi.data.csv_file import iter_csv_rows
from fedmpi.data.dataset import Dataset
from fedmpi.data.download.catalogue import CATALOGUE
from fedmpi.data.download.fetch import fetch_or_advise
from fedmpi.data.sources.images.class_images import Fraction, list_images_by_class, make_labelled_image_reader
from fedmpi.data.sources.images.decode import DecodeOptions, Size
from fedmpi.data.sources.labelled_files import LabelledFile, dataset_from_files, list_subfolders, read_csv_rows
from fedmpi.data.sources.source_utils import find_file, select_sites
from fedmpi.data.transforms.color import NORMALISATION_CONSTANTS as PIXEL_STATISTICS

CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# The sites of PACS and of Office-Home are in the order of the catalogue.
PACS_SITES = ("art_painting", "cartoon", "photo", "sketch")
OFFICE_HOME_SITES = ("art", "clipart", "product", "real_world")
HAM_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
HAM_SOURCES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")


def _find_folder(root: Path, source: str, part: int, remedy: str) -> Path:
    """Return the folder of one part of a data set; raise MissingDataError if it does not exist.

    source: the data set's name in the catalogue; part: the index of the part in the entry's `parts`.
    """
    candidates = [root / path for path in CATALOGUE[source].parts[part].paths]
    folder = next((path for path in candidates if path.is_dir()), None)
    if folder is None:
        expected = " or ".join(map(str, candidates))
        raise MissingDataError(f"{source}: folder {expected} not found (data.root = {root}); {remedy}")
    return folder


def cinic10(root: Path, *, download: bool = False, val: Literal["join", "leave"] = "leave") -> Dataset:
    """CINIC-10 (Darlow 2018): 90,000 + 90,000 colour 32x32 images, 10 classes, in root/CINIC-10/{train,test}.

    val: what happens to the 90,000 images of `valid`: join adds them to the training part; leave does not read them
    (FedSOL).
    """
    remedy = fetch_or_advise("cinic10", root, download)
    samples = [
        sample
        for k, part in enumerate(("train", "val", "test"))
        if part != "val" or val == "join"
        for sample in list_images_by_class(
            _find_folder(root, "cinic10", k, remedy), CINIC_CLASSES, class_source="CINIC-10's", part=part
        )
    ]
    return dataset_from_files(
        samples,
        make_labelled_image_reader(CINIC_CLASSES, DecodeOptions(32, 3, *PIXEL_STATISTICS["cinic10"])),
        "cinic10",
    )


def tiny_imagenet(root: Path, *, download: bool = False) -> Dataset:
    """Tiny-ImageNet (Le 2015): 100,000 + 10,000 colour 64x64 images, 200 classes, in root/tiny-imagenet-200.

    The test part is the published validation part, as in papers, because the labels of `test` were never published.
    Classes are numbered in the order of their WordNet ids.
    """
    remedy = fetch_or_advise("tiny_imagenet", root, download)
    folder_name = "tiny-imagenet-200"
    names = sorted(
        find_file(root, (f"{folder_name}/wnids.txt",), "tiny_imagenet", remedy).read_text(encoding="ascii").split()
    )
    notes = find_file(root, (f"{folder_name}/val/val_annotations.txt",), "tiny_imagenet", remedy)
    samples = list_images_by_class(root / folder_name / "train", names, "images", "wnids.txt", "train")
    for k, line in enumerate(notes.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        file, label, *_ = [*line.split("\t"), ""]  # the other fields are the object's bounding box
        sample = LabelledFile(notes.parent / "images" / file, label, location=f"{notes}, line {k}", part="test")
        if label not in names:
            raise sample.make_error(
                f"{shorten_repr(line)} is not a file name followed by a class of wnids.txt; {remedy}"
            )
        samples.append(sample)
    return dataset_from_files(
        samples, make_labelled_image_reader(names, DecodeOptions(64, 3, *PIXEL_STATISTICS["imagenet"])), "tiny_imagenet"
    )


def pacs(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """PACS (Li 2017): 9,991 colour images, 7 classes; the sites are art_painting, cartoon, photo and sketch.

    The folders SITE/CLASS are in root/PACS, root/PACS/kfold, root/pacs/images or root/kfold.

    size: images are scaled and centre-cropped to size x size.
    test_fraction: the fraction of each class at each site that is held out as its test part, the same for every seed.
    """
    return _read_domains("pacs", PACS_SITES, 7, root, site, size, test_fraction)


def office_home(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """Office-Home (Venkateswara 2017): 15,588 colour images, 65 classes; the sites are four styles.

    The sites are art, clipart, product and real_world. Their folders Art, Clipart, Product and Real World, with one
    folder per class, are in root/OfficeHomeDataset_10072016, root/office_home or root/OfficeHome.

    size: images are scaled and centre-cropped to size x size.
    test_fraction: the fraction of each class at each site that is held out as its test part, the same for every seed.
    """
    return _read_domains("office_home", OFFICE_HOME_SITES, 65, root, site, size, test_fraction)


def _read_domains(
    source: str, sites: Sequence[str], number: int, root: Path, site: str | None, size: int, test_fraction: float
) -> Dataset:
    """Read a data set in which each site has images of one style; `number` is the number of classes."""
    remedy, samples = fetch_or_advise(source, root, False), []
    classes: list[str] = []
    for name in select_sites(source, sites, site):
        folder = _find_folder(root, source, sites.index(name), remedy)
        class_folders = list_subfolders(folder)
        classes = classes or class_folders
        if len(class_folders) != number:
            raise UserError(
                f"{folder} contains {len(class_folders)} class folders, but {source} has {number} classes at each "
                f"site; {remedy}"
            )
        samples += list_images_by_class(folder, classes, class_source=source, site=name)
    return _domain_dataset(source, samples, classes, site, size, test_fraction)


def ham10000(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """HAM10000 (Tschandl 2018): 10,015 images of skin lesions, 7 classes; the sites are the four sources of the images.

    root/HAM10000 contains HAM10000_metadata.csv, with the column `dataset`, and the .jpg files, which may be in
    subfolders. The sites are vidir_molemax, vidir_modern, rosendahl and vienna_dias. All images of a lesion are in the
    same part.

    size: images are scaled and centre-cropped to size x size.
    test_fraction: the fraction of each class at each site that is held out as its test part, the same for every seed.
    """
    path = find_file(root, CATALOGUE["ham10000"].parts[0].paths, "ham10000", fetch_or_advise("ham10000", root, False))
    columns = {name: name for name in ("lesion_id", "image_id", "dx", "dataset")}
    rows = read_csv_rows(path, columns, "\t" if path.suffix == ".tab" else ",")
    pictures = {file.stem: file for file in sorted(path.parent.rglob("*.jpg")) if not file.name.startswith(".")}
    samples = []
    for location, values in rows:
        for column, allowed in (("dx", HAM_CLASSES), ("dataset", HAM_SOURCES)):
            if values[column] not in allowed:
                raise UserError(
                    f"{location}: column {column!r} contains {values[column]!r}; allowed: {', '.join(allowed)}; "
                    "download it again"
                )
        file = pictures.get(values["image_id"], path.parent / f"{values['image_id']}.jpg")
        samples.append(
            LabelledFile(file, values["dx"], location=location, site=values["dataset"], group=values["lesion_id"])
        )
    selected = []
    for name in select_sites("ham10000", HAM_SOURCES, site):
        of_site = [sample for sample in samples if sample.site == name]
        if not of_site:
            raise UserError(f"{path} has no row of site {name}; download it again")
        selected += of_site
    return _domain_dataset("ham10000", selected, HAM_CLASSES, site, size, test_fraction)


def _domain_dataset(
    source: str,
    samples: Sequence[LabelledFile],
    classes: Sequence[str],
    site: str | None,
    size: int,
    test_fraction: float,
) -> Dataset:
    read = make_labelled_image_reader(classes, DecodeOptions(size, 3, *PIXEL_STATISTICS["imagenet"]))
    return dataset_from_files(samples, read, source, classes=classes, silo=site, test_fraction=test_fraction)


def retina(
    root: Path,
    *,
    site: str | None = None,
    split: Literal["split_1", "split_2", "split_3"] = "split_1",
    size: Size = 256,
) -> Dataset:
    """Retina (Kaggle; Yan 2023): fundus images of 5 clients, 2 classes, in root/Retina.

    The files are labels.csv (`name,label`), test.csv, 5_clients/SPLIT/client_1.csv ... client_5.csv (one name per
    line), and the images as arrays train/NAME and test/NAME (.npy, shape (H, W, 3), values 0..255). The sites are
    client_1 ... client_5. The test part is common to all sites, also in silo mode.

    split: the published partition of the training images among the clients: split_1, split_2 or split_3.
    size: images are scaled and centre-cropped to size x size.
    """
    sites = tuple(f"client_{k}" for k in range(1, 6))
    decoding = DecodeOptions(size, 3, *PIXEL_STATISTICS["retina"])
    return _read_ssl_fl(root / "Retina", "retina", f"5_clients/{split}", sites, site, 2, decoding)


def covid_fl(root: Path, *, site: str | None = None, size: Size = 224) -> Dataset:
    """COVID-FL (Yan 2023): chest X-rays of 12 sites, 3 classes (normal, pneumonia, COVID-19), in root/COVID-FL.

    The files are labels.csv (`name,label`), test.csv, 12_clients/split_real/SITE.csv (one name per line), and the
    images train/NAME, test/NAME. The sites are bimcv, cohen, eurorad, gz, ml-workgroup, ricord_c, rsna-0 ... rsna-4 and
    sirm. The test part is common to all sites, also in silo mode.

    size: images are scaled and centre-cropped to size x size.
    """
    lists = [Path(part.paths[0]) for part in CATALOGUE["covid_fl"].parts]
    sites = tuple(file.stem for file in lists if file.parent.name == "split_real")
    decoding = DecodeOptions(size, 3, *PIXEL_STATISTICS["imagenet"])
    return _read_ssl_fl(root / "COVID-FL", "covid_fl", "12_clients/split_real", sites, site, 3, decoding)


def _read_ssl_fl(
    folder: Path,
    source: str,
    split: str,
    sites: tuple[str, ...],
    site: str | None,
    classes: int,
    decoding: DecodeOptions,
) -> Dataset:
    """Read a data set in the layout of SSL-FL (Yan 2023): a table of labels, and one list of files per client.

    Args:
        folder: the folder of the data set.
        source: its name in the catalogue.
        split: the folder of the lists, relative to `folder`.
        sites: the names of all sites.
        site: the silo to read; None: all sites.
        classes: the number of classes.
        decoding: how images are decoded.
    """
    remedy = fetch_or_advise(source, folder.parent, False)

    def read_lines(path: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the location ("labels.csv, line 7") and the fields of each line."""
        file = find_file(folder.parent, (f"{folder.name}/{path}",), source, remedy)
        for number, fields in iter_csv_rows(file, remedy="download it again"):
            yield f"{file}, line {number}", [field.strip() for field in fields]

    chosen = select_sites(source, sites, site)
    allowed = {f"{k}{end}": str(k) for k in range(classes) for end in ("", ".0")}  # the authors write 0.0 and 1.0
    labels: dict[str, str] = {}
    for location, fields in read_lines("labels.csv"):
        if len(fields) < 2 or fields[1] not in allowed:
            problem = f"{shorten_repr(','.join(fields))} is not a name followed by a label 0..{classes - 1}"
            raise UserError(f"{location}: {problem}; download the file again")
        labels[fields[0]] = allowed[fields[1]]

    def list_samples(path: str, part: str) -> list[LabelledFile]:
        """Return the files that a list names, each once, in the order of the list."""
        samples: dict[str, LabelledFile] = {}
        for location, (name, *_) in read_lines(path):
            if name not in labels:
                raise UserError(f"{location}: {name!r} has no label in labels.csv; download both files again")
            samples.setdefault(name, LabelledFile(folder / part / name, labels[name], location=location, part=part))
        return list(samples.values())

    parts = [list_samples(f"{split}/{name}.csv", "train") for name in chosen]
    samples = [sample for part in (*parts, list_samples("test.csv", "test")) for sample in part]
    data = dataset_from_files(samples, make_labelled_image_reader([str(k) for k in range(classes)], decoding), source)
    if site is not None:
        return data
    owner = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
    return replace(data, site=owner, site_names=sites)
