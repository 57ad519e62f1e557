"""Data sets that lie behind an account, a click or terms to be accepted: what to fetch by hand, and where it goes."""

from __future__ import annotations

from fedmpi.data.fetching.listing import Listing, Part, one

SSL_FL = "https://github.com/rui-yan/SSL-FL/tree/main/data"
COVID_SITES = (
    *("bimcv", "cohen", "eurorad", "gz", "ml-workgroup", "ricord_c"),
    *("rsna-0", "rsna-1", "rsna-2", "rsna-3", "rsna-4", "sirm"),
)
PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
PACS_FOLDERS = ("PACS", "PACS/kfold", "pacs/images", "pacs/images/kfold", "kfold")
HOME_FOLDERS = ("OfficeHomeDataset_10072016", "office_home", "OfficeHome")
HOME = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
HAM_FOLDERS = ("HAM10000", "ham10000")
HAM_TABLES = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")

SETS: dict[str, Listing] = {
    "pacs": Listing(
        "9,991: " + ", ".join(f"{name} {n:,}" for name, n in PACS.items()),
        "colour 227x227 pictures of four styles, which are the sites; 7 classes",
        0,
        "source: pacs, partition: {scheme: site}",
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated",
        "Li, Yang, Song, Hospedales: Deeper, broader and artier domain generalization. ICCV 2017",
        parts=tuple(Part(tuple(f"{at}/{name}" for at in PACS_FOLDERS), files=n) for name, n in PACS.items()),
        by_hand="Google Drive asks for a click: take PACS.zip from its home (or where DomainBed and Dassl.pytorch "
        "link to) and unpack it, so that PACS/art_painting, PACS/cartoon, PACS/photo and PACS/sketch hold a folder for "
        "each class. For `split: files` put the authors' *_kfold.txt beside the four folders, or into splits/ beside "
        "images/.",
    ),
    "office_home": Listing(
        "15,588: " + ", ".join(f"{name} {n:,}" for name, n in HOME.items()),
        "colour pictures of four styles, which are the sites; 65 classes",
        0,
        "source: office_home, partition: {scheme: site}",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "for research, not commercial",
        "Venkateswara, Eusebio, Chakraborty, Panchanathan: Deep hashing network for unsupervised domain adaptation. "
        "CVPR 2017",
        parts=tuple(Part(tuple(f"{at}/{name}" for at in HOME_FOLDERS), files=n) for name, n in HOME.items()),
        by_hand="Google Drive asks for a click: take OfficeHomeDataset_10072016.zip from its home and unpack "
        "it, so that OfficeHomeDataset_10072016/ holds Art, Clipart, Product and Real World.",
    ),
    "ham10000": Listing(
        "10,015",
        "colour 600x450 pictures of skin lesions, 7 classes, of four sources, which are the sites",
        0,
        "source: ham10000, partition: {scheme: site}",
        "https://doi.org/10.7910/DVN/DBW86T",
        "CC BY-NC 4.0; terms to be accepted at its home",
        "Tschandl, Rosendahl, Kittler: The HAM10000 dataset. Scientific Data 2018",
        parts=(
            Part(
                tuple(f"{at}/{file}" for at in HAM_FOLDERS for file in ("HAM10000_metadata.csv", "HAM10000_metadata"))
            ),
            Part(tuple(HAM_FOLDERS)),
        ),
        by_hand="Harvard Dataverse asks to accept its terms: take HAM10000_metadata (a CSV with the column `dataset`, "
        "which Kaggle's copy lacks), HAM10000_images_part_1.zip and _part_2.zip, and unpack them to HAM10000/.",
    ),
    "retina": Listing(
        "what its train.csv and test.csv name",
        "colour 256x256 fundus pictures, 2 classes, divided among 5 clients in three ways",
        0,
        "source: retina, split: split_1, partition: {scheme: site}",
        SSL_FL,
        "that of Kaggle's Diabetic Retinopathy Detection",
        "Yan, Qu, Wei, Huang, Shen, Rubin, Xing, Zhou: Label-efficient self-supervised federated learning for tackling "
        "data heterogeneity in medical imaging. IEEE TMI 2023",
        parts=(
            *(one(f"Retina/{file}") for file in ("labels.csv", "test.csv", "train", "test")),
            *(one(f"Retina/5_clients/{split}") for split in ("split_1", "split_2", "split_3")),
        ),
        by_hand="Google Drive asks for a click: take Retina from the table at its home and unpack it to Retina/.",
    ),
    "covid_fl": Listing(
        "what its train.csv and test.csv name",
        "chest X-ray pictures, 3 classes, of twelve sites",
        0,
        "source: covid_fl, partition: {scheme: site}",
        SSL_FL,
        "those of its sources: BIMCV, Cohen, Eurorad, GZ, ml-workgroup, RICORD, RSNA, SIRM",
        "Yan, Qu, Wei, Huang, Shen, Rubin, Xing, Zhou: Label-efficient self-supervised federated learning for tackling "
        "data heterogeneity in medical imaging. IEEE TMI 2023",
        parts=(
            *(one(f"COVID-FL/{file}") for file in ("labels.csv", "test.csv", "train", "test")),
            *(one(f"COVID-FL/12_clients/split_real/{site}.csv") for site in COVID_SITES),
        ),
        by_hand="Google Drive asks for a click: take COVID-FL from the table at its home and unpack it to COVID-FL/.",
    ),
}
