"""Data sources: functions f(root, **options) that read a data set and return a `Dataset`.

A source has the parameter `site` if its files are stored by site; in silo mode it then opens the files of that site
only. A source has the parameter `download` if it can fetch missing files (`data.download: true`).
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "cifar10": "fedmpi.data.sources.images.public_arrays:cifar10",
    "cifar100": "fedmpi.data.sources.images.public_arrays:cifar100",
    "cinic10": "fedmpi.data.sources.images.public_files:cinic10",
    "covid_fl": "fedmpi.data.sources.images.public_files:covid_fl",
    "csv_images": "fedmpi.data.sources.images.class_images:csv_images",
    "digits": "fedmpi.data.sources.digits:digits",
    "emnist": "fedmpi.data.sources.images.public_arrays:emnist",
    "fashion_mnist": "fedmpi.data.sources.images.public_arrays:fashion_mnist",
    "ham10000": "fedmpi.data.sources.images.public_files:ham10000",
    "hdf5": "fedmpi.data.sources.hdf5:hdf5",
    "heart_disease": "fedmpi.data.sources.flamby:heart_disease",
    "image_folder": "fedmpi.data.sources.images.class_images:image_folder",
    "leaf": "fedmpi.data.sources.leaf:leaf",
    "image_mask": "fedmpi.data.sources.images.image_mask:image_mask",
    "medmnist": "fedmpi.data.sources.images.public_arrays:medmnist",
    "mnist": "fedmpi.data.sources.images.public_arrays:mnist",
    "nifti": "fedmpi.data.sources.nifti:nifti",
    "npz": "fedmpi.data.sources.named_arrays:npz",
    "office_home": "fedmpi.data.sources.images.public_files:office_home",
    "pacs": "fedmpi.data.sources.images.public_files:pacs",
    "retina": "fedmpi.data.sources.images.public_files:retina",
    "saved_dataset": "fedmpi.data.sources.tables.saved_dataset:saved_dataset",
    "shakespeare": "fedmpi.data.sources.texts:shakespeare",
    "stl10": "fedmpi.data.sources.images.public_arrays:stl10",
    "svhn": "fedmpi.data.sources.images.public_arrays:svhn",
    "table": "fedmpi.data.sources.tables.table_source:table",
    "tcga_brca": "fedmpi.data.sources.flamby:tcga_brca",
    "text": "fedmpi.data.sources.texts:text",
    "tokenized_text": "fedmpi.data.sources.tables.tokenized_text:tokenized_text",
    "tiny_imagenet": "fedmpi.data.sources.images.public_files:tiny_imagenet",
}

KIND = PluginKind("data set", registry, "data", ("root",), ("site",))
