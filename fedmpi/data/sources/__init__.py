"""Data sources:  f(root, **options) -> Dataset.

With `site=` (silo mode) a source opens the files of that site only; with `download=true` it may fetch what is missing.
Only sources that come by site take the former, only those with a public home the latter.
"""

registry: dict[str, str] = {
    "cifar10": "fedmpi.data.sources.cifar10:cifar10",
    "digits": "fedmpi.data.sources.digits:digits",
    "fashion_mnist": "fedmpi.data.sources.mnist:fashion_mnist",
    "heart_disease": "fedmpi.data.sources.heart_disease:heart_disease",
    "image_folder": "fedmpi.data.sources.image_folder:image_folder",
    "mnist": "fedmpi.data.sources.mnist:mnist",
    "npz": "fedmpi.data.sources.npz:npz",
}
