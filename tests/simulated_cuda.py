"""Simulate CUDA devices on the CPU, to find device errors and host synchronisation on machines without a GPU.

    python simulated_cuda.py [--gpus N] SCRIPT ARGUMENTS
    python simulated_cuda.py [--gpus N] -m MODULE ARGUMENTS

runs a program that sees N GPUs; with --server-on-cpu rank 0 of a torchrun sees none. All tensors are in host memory and
all kernels are CPU kernels; each storage is marked with its simulated device. Errors of CUDA are raised here, too: for
operands on two devices; for a CPU generator, a call of `numpy()` or a message over gloo with a tensor on a GPU; and,
with deterministic algorithms, for kernels without a deterministic form. Pinned memory contains nan after an
asynchronous copy until the host has synchronised. `COUNTS` contains the numbers of kernel launches, copies between
devices and synchronisations of the host.

The patches stay until the process ends, so that each use needs a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

KNOWN_VERSIONS = ("2.13.",)  # of torch: the patches rest on internals that change between versions
CPU = torch.device("cpu")
MEMORY = 8 << 30  # bytes of a simulated GPU
COUNTS: Counter[str] = Counter()  # launch, upload, asynchronous upload, download or sync -> times
PENDING_COPIES: list[tuple[Tensor, Tensor]] = []  # asynchronous copies to pinned memory: target, its future values
SETTINGS = SimpleNamespace(gpus=1, nccl=False)

# The results of these operators have a shape or a value that the host must know, so that it waits for the GPU.
SYNCHRONISING = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "_linalg_check_errors", "linalg_eigh", "_linalg_eigh", "linalg_lstsq"),
    *("_linalg_svd", "linalg_cholesky_ex", "linalg_eig"),
}
# These have no deterministic CUDA kernel: the list of torch.use_deterministic_algorithms.
NOT_DETERMINISTIC = {
    *("adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "avg_pool3d_backward", "_ctc_loss_backward", "max_pool3d_with_indices_backward"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "histc", "bincount"),
    *("upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward", "kthvalue", "cumsum"),
    *("replication_pad1d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "nll_loss2d_forward"),
    *("_embedding_bag_dense_backward", "median.dim", "nanmedian.dim"),
}
# Operators that may have operands on two devices by design.
COPIES = {"copy_", "_to_copy", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

# gpu: the current GPU, 0 in each new thread; target: the device of a tensor that is being copied or created; graph: the
# graph that is being captured
_thread = threading.local()
_original = SimpleNamespace(
    **{name: getattr(Tensor, name) for name in ("to", "numpy", "tolist")},
    clone_storage=torch.UntypedStorage.clone,
    bootstrap=threading.Thread._bootstrap_inner,
)


# ---- the device of a tensor ----
def _storage(x: Tensor) -> torch.UntypedStorage:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.untyped_storage()


def device_of(x: Tensor) -> torch.device | None:
    """Return the device of a tensor; None if torch's C++ code has created it and the device is not known yet."""
    try:
        return getattr(_storage(x), "simulated_device", None)
    except NotImplementedError:  # a tensor without a storage
        return None


def _resolve(device: object) -> torch.device:
    """Return a device with its index."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device(device)  # type: ignore[arg-type]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= SETTINGS.gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)
    return device


def _mark(x: Tensor, device: torch.device) -> Tensor:
    """Set the device of a tensor's storage if it has none yet, and return the tensor."""
    storage = _storage(x)
    if getattr(storage, "simulated_device", None) is None:
        storage.simulated_device = device
    return x


def _count(what: str) -> None:
    if getattr(_thread, "graph", None) is not None and what in ("sync", "download"):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    COUNTS[what] += 1
    if what == "sync" and PENDING_COPIES:
        with _disable_current_modes(), torch.no_grad():
            for target, values in PENDING_COPIES:
                target.copy_(values)
        PENDING_COPIES.clear()


def _count_upload(waits: bool) -> None:
    """Count a copy to a GPU; a blocking copy also waits for all earlier work of the GPU."""
    _count("upload" if waits else "asynchronous upload")
    if waits:
        _count("sync")


# ---- operators ----
def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [x for value in values for x in _tensors(value)]
    return [x for value in values.values() for x in _tensors(value)] if isinstance(values, dict) else []


class SimulatedCuda(TorchDispatchMode):
    """A dispatch mode that checks the devices of each operator's operands, runs it on the CPU and marks its results."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        # In inference mode torch does not decompose compound operators before it calls this mode.
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        graph = getattr(_thread, "graph", None)
        if graph is None:
            return self._run(func, args, kwargs)
        graph.save(func, args, kwargs)
        found = self._run(func, args, kwargs)
        graph.record(func, args, kwargs, found)
        return found

    def _run(self, func, args, kwargs):
        name = func._schema.name.split("::")[1]
        operands = _tensors([args, kwargs])
        places = {id(x): device_of(x) for x in operands}
        gpus = {place for place in places.values() if place is not None and place.type == "cuda"}
        asked, target = kwargs.get("device"), getattr(_thread, "target", None)
        if asked is not None:
            asked = target or _resolve(asked)
            if asked.type == "meta":
                return func(*args, **kwargs)
            kwargs["device"] = CPU
        if name in COPIES:
            return self._copy(func, name, args, kwargs, asked)
        if asked is not None and (target is not None or asked.type == "cuda"):
            result = asked
        elif gpus:
            self._check_operands(func, name, args, kwargs, places, gpus)
            result = next(iter(gpus))
        else:
            known = any(place == CPU for place in places.values())
            result = CPU if known else None
        for x in operands if result is not None and len(operands) > 1 else ():
            if places[id(x)] is None and x.dim():
                _mark(x, result)
        generator = self._find_generator(args, kwargs, result)
        if result is None or result.type == "cpu":
            found = func(*args, **kwargs)
        else:
            found = self._launch(func, name, args, kwargs, result, generator)
        if name == "_pack_padded_sequence":
            _mark(found[1], CPU)  # the sizes of batches
        if result is not None:
            for x in _tensors(found):
                _mark(x, result)
        return found

    def _check_operands(self, func, name, args, kwargs, places, gpus) -> None:
        """Raise the error of CUDA if operands are on several devices."""
        if len(gpus) > 1:
            first, second = sorted(map(str, gpus))[:2]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {first} and {second} ({name})"
            )
        on_cpu = [x for x in _tensors([args, kwargs]) if places[id(x)] == CPU]
        if name in INDEXING:
            if places[id(args[0])] == CPU:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            moved = {id(x) for x in (*_tensors(args[1]), *(x for x in _tensors(args[2:]) if not x.dim()))}
            if any(id(x) in moved for x in on_cpu):
                _count_upload(waits=True)
            on_cpu = [x for x in on_cpu if id(x) not in moved]
        if name == "_pack_padded_sequence":
            on_cpu = [x for x in on_cpu if x is not args[1]]  # the lengths must be on the CPU
        if name not in ("clamp", "clamp_") and (
            torch.Tag.pointwise in func.tags
            or name in ("where", "masked_fill", "fill_")
            or name.startswith("_foreach_")
        ):
            written = {id(x) for x in _find_written(func, args, kwargs)}
            on_cpu = [x for x in on_cpu if x.dim() or id(x) in written]
        if on_cpu:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {next(iter(gpus))} "
                f"and cpu! (when running {func}, with a tensor of shape {tuple(on_cpu[0].shape)} on the cpu)"
            )

    def _find_generator(self, args, kwargs, result) -> torch.Generator | None:
        """Return the generator among the arguments, which is a CPU generator, since fedmpi creates no others."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
        if given is not None and result is not None and result.type == "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return given

    def _launch(self, func, name, args, kwargs, device, generator):
        """Run the operator as a kernel of a simulated GPU."""
        if func.is_view or name in ("detach", "alias", "lift_fresh", "_unsafe_view"):
            return func(*args, **kwargs)
        names = {name, f"{name}.{func._overloadname}"}
        if torch.are_deterministic_algorithms_enabled() and names & NOT_DETERMINISTIC and not _is_exempt(name, args):
            raise RuntimeError(
                f"{name}_cuda does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'"
            )
        _count("launch")
        masks = name in INDEXING and any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
        if name in SYNCHRONISING or masks or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            _count("sync")
        if generator is None and torch.Tag.nondeterministic_seeded in func.tags:
            with _drawing_from(device):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _copy(self, func, name, args, kwargs, asked):
        """Run a copy operator, whose operands may be on two devices, and count the copy.

        In calls by a C++ function `asked` is the CPU for tensors of both devices.
        """
        if name == "_to_copy":
            source = device_of(args[0])
            target = getattr(_thread, "target", None) or (
                asked if asked is not None and asked.type == "cuda" else source
            )
        else:
            target, source = (device_of(x) for x in args[:2])
            target = target or source  # the target may have been created by C++ code, which sets no device
        found = func(*args, **kwargs)
        if target is not None and source is not None and target != source:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if source.type == "cuda" and target.type == "cuda":
                _count("launch")
            elif target.type == "cuda":
                _count_upload(waits)
            else:
                _count("download")
                place = found if name == "_to_copy" else args[0]  # `to` creates its result in pinned memory
                if waits or (name == "copy_" and not is_pinned(place)):
                    _count("sync")
                else:
                    _storage(place).simulated_pinned = True
                    PENDING_COPIES.append((place, place.clone()))
                    place.fill_(torch.nan if place.is_floating_point() else 0)
        elif target is not None and target.type == "cuda":
            _count("launch")
        if target is not None:
            _mark(found, target)
        return found


def _find_written(func, args, kwargs) -> list[Tensor]:
    """Return the operands that an operator writes to."""
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    # The schemas of operators do not declare that running statistics are written to.
    written = [
        each.name
        for each in arguments
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in ("running_mean", "running_var")
    ]
    return _tensors([given.get(name) for name in written])


def _is_exempt(name: str, args: tuple) -> bool:
    """Return whether this call of an operator in NOT_DETERMINISTIC is deterministic."""
    if name == "cumsum":
        return not args[0].is_floating_point()
    return name == "bincount" and (len(args) < 2 or args[1] is None)


# ---- tensor methods ----
def _to(self: Tensor, *args, **kwargs) -> Tensor:
    args = list(args)
    target, here = None, self.device
    for i, value in enumerate(args):
        if isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool) and not i):
            target, args[i] = _resolve(value), CPU
        elif isinstance(value, Tensor):
            target, args[i] = value.device, value.dtype
    if isinstance(kwargs.get("other"), Tensor):
        other = kwargs.pop("other")
        target, kwargs["dtype"] = other.device, other.dtype
    if kwargs.get("device") is not None:
        target, kwargs["device"] = _resolve(kwargs["device"]), CPU
    if target is None or target == here or self.is_meta or target.type == "meta":
        if target is not None and target.type == "meta":
            args = [target if value is CPU else value for value in args]
            kwargs = kwargs | ({"device": target} if "device" in kwargs else {})
        return _original.to(self, *args, **kwargs)
    _thread.target = target
    try:
        return _original.to(self, *args, **kwargs | {"copy": True})
    finally:
        _thread.target = None


def _numpy(self: Tensor, **kwargs):
    if self.is_cuda:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
    return _original.numpy(self, **kwargs)


def _tolist(self: Tensor):
    if self.is_cuda:
        _count("download")
        _count("sync")
    return _original.tolist(self)


def is_pinned(self: Tensor, device=None) -> bool:
    return getattr(_storage(self), "simulated_pinned", False)


def _pin_memory(self: Tensor, device=None) -> Tensor:
    if self.is_cuda:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    pinned = self if is_pinned(self) else self.clone()
    _storage(pinned).simulated_pinned = True
    return pinned


def _clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = _original.clone_storage(self)
    copy.simulated_device = getattr(self, "simulated_device", None)
    return copy


def _make_factory(function, from_data: bool):
    """Wrap a torch function that creates a tensor; without a device it creates the tensor on the CPU.

    from_data: the function takes data, such as `torch.tensor`.
    """

    def factory(*args, **kwargs):
        device = _resolve(CPU if kwargs.get("device") is None else kwargs["device"])
        pinned = kwargs.pop("pin_memory", False)
        if from_data and device.type == "cuda":
            given = args[0] if args else kwargs.get("data")
            if isinstance(given, Tensor) and given.device == device:
                return _original.to(function(*args, **kwargs | {"device": CPU}), CPU)
            return _to(_mark(function(*args, **{k: v for k, v in kwargs.items() if k != "device"}), CPU), device)
        made = function(*args, **kwargs)
        if isinstance(made, Tensor) and not made.is_meta:
            given = args[0] if from_data and args and isinstance(args[0], Tensor) else None
            if given is not None and device.type == "cpu" and kwargs.get("device") is None:
                device = given.device  # as_tensor of a tensor keeps the device
            _mark(made, device)
            if pinned:
                _storage(made).simulated_pinned = True
        return made

    factory.__name__ = getattr(function, "__name__", "factory")
    return factory


def _make_like(function):
    """Wrap a torch function that creates a tensor like another one, by default on that tensor's device."""

    def like(x, *args, **kwargs):
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            return function(x, *args, **kwargs)
        _thread.target = _resolve(device)
        try:
            return function(x, *args, **kwargs | {"device": CPU})
        finally:
            _thread.target = None

    return like


def _new_tensor(self: Tensor, data, **kwargs) -> Tensor:
    kwargs = {"dtype": self.dtype, "device": self.device} | kwargs
    return torch.tensor(data, **kwargs)


# ---- random numbers ----
_gpu_generators: list[torch.Generator] = []


@contextmanager
def _drawing_from(device: torch.device) -> Iterator[None]:
    """Replace the state of the CPU's global generator by that of a GPU's generator within this context."""
    default, generator = torch.default_generator, _gpu_generators[device.index]
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _seed_all(seed: int) -> None:
    for generator in _gpu_generators:
        generator.manual_seed(seed)


# ---- torch.cuda and torch.distributed ----
class _Stream:
    """A stream or an event. All work is done immediately, so that `synchronize` only counts its calls."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def synchronize(self) -> None:
        _count("sync")

    def record(self, *args) -> None:
        pass

    wait = wait_stream = wait_event = record_event = record

    def query(self) -> bool:
        return True


def _properties(device=None) -> SimpleNamespace:
    index = _resolve("cuda" if device is None else device).index
    place = {"uuid": f"simulated-{index}", "pci_domain_id": 0, "pci_bus_id": index, "pci_device_id": 0}
    return SimpleNamespace(name="Simulated GPU", total_memory=MEMORY, major=9, minor=0, **place)


@contextmanager
def _device(device) -> Iterator[None]:
    before = torch.cuda.current_device()
    torch.cuda.set_device(device)
    try:
        yield
    finally:
        torch.cuda.set_device(before)


def _patch_cuda() -> None:
    def set_device(device) -> None:
        _thread.gpu = _resolve(device).index

    def set_states(states) -> None:
        for generator, state in zip(_gpu_generators, states, strict=True):
            generator.set_state(state)

    _gpu_generators.extend(torch.Generator().manual_seed(0) for _ in range(SETTINGS.gpus))
    patches = {
        "_lazy_init init empty_cache reset_peak_memory_stats": lambda *_: None,
        "is_initialized is_bf16_supported": lambda *_: True,
        "is_available": lambda: SETTINGS.gpus > 0,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: SETTINGS.gpus,
        "current_device": lambda: getattr(_thread, "gpu", 0),
        "set_device": set_device,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "max_memory_allocated memory_allocated memory_reserved": lambda *_: 0,
        "synchronize": lambda *_: _count("sync"),
        "manual_seed_all manual_seed": _seed_all,
        "get_rng_state_all": lambda: [generator.get_state() for generator in _gpu_generators],
        "set_rng_state_all": set_states,
        "get_rng_state": lambda device="cuda": _gpu_generators[_resolve(device).index].get_state(),
        "set_rng_state": lambda state, device="cuda": _gpu_generators[_resolve(device).index].set_state(state),
        "current_stream Stream Event stream": _Stream,
        "device": _device,
        "CUDAGraph": CUDAGraph,
        "graph": _capture,
    }
    for names, value in patches.items():
        for name in names.split():
            setattr(torch.cuda, name, value)
    torch.version.cuda = "simulated"


class CUDAGraph:
    """A list of captured operators, which `replay` runs in order. A capture itself changes no tensor."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []  # operator, positional arguments, keyword arguments, results
        self.before: dict[tuple, tuple[Tensor, Tensor]] = {}  # tensors that are written to, with copies from before
        self.own: set[int] = set()  # storages that were created during the capture

    def record(self, func, args, kwargs, found) -> None:
        if not func.is_view:
            self.calls.append((func, args, kwargs, _tensors(found)))
        self.own |= {id(_storage(x)) for x in _tensors(found)}

    def save(self, func, args, kwargs) -> None:
        """Save copies of the tensors that the operator is about to write to."""
        for each in _find_written(func, args, kwargs):
            if id(_storage(each)) not in self.own:
                self.before.setdefault((each.data_ptr(), each.shape), (each, _unwatched(each.clone)))

    def replay(self) -> None:
        _count("launch")
        for func, args, kwargs, results in self.calls:
            with _drawing_from(torch.device("cuda", 0)):
                found = _unwatched(func, *args, **kwargs)
            for old, new in zip(results, _tensors(found), strict=False):
                if old.data_ptr() != new.data_ptr():
                    _unwatched(old.copy_, new)

    def pool(self) -> int:
        return 0


def _unwatched(function, *args, **kwargs):
    """Call a torch function without the simulation and without autograd."""
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        return function(*args, **kwargs)


@contextmanager
def _capture(graph: CUDAGraph, pool=None, stream=None, capture_error_mode="global") -> Iterator[None]:
    _thread.graph, state = graph, _gpu_generators[0].get_state()
    try:
        yield
    finally:
        _thread.graph = None
        _gpu_generators[0].set_state(state)
        for x, held in reversed(graph.before.values()):
            _unwatched(x.copy_, held)


class _Autocast(torch.autocast):
    """Autocast for a simulated GPU, which casts for the CPU, since the CPU's kernels run."""

    def __init__(self, device_type, *args, **kwargs) -> None:
        super().__init__("cpu", *args, **kwargs)


class PolledWork:
    """A message of gloo that can be polled like a message of NCCL: a thread waits for it."""

    def __init__(self, work) -> None:
        self.error, self.thread = None, threading.Thread(target=self._wait_for, args=(work,), daemon=True)
        self.thread.start()

    def _wait_for(self, work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self.error = error

    def is_completed(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()
        if self.error:
            raise self.error


def _patch_distributed() -> None:
    """Patch torch.distributed: run NCCL's operations over gloo, and let gloo itself reject tensors on a GPU."""
    initialise, batch, broadcast = dist.init_process_group, dist.batch_isend_irecv, dist.broadcast

    def init_process_group(backend, *args, device_id=None, **kwargs):
        SETTINGS.nccl = backend == "nccl"
        return initialise("gloo" if backend == "nccl" else backend, *args, **kwargs)

    def _on_gpu(*tensors):
        if SETTINGS.nccl and not all(x.is_cuda for x in tensors):
            raise RuntimeError("No backend type associated with device type cpu")

    def broadcast_(tensor, *args, **kwargs):
        _on_gpu(tensor)
        return broadcast(tensor, *args, **kwargs)

    def batch_isend_irecv(operations):
        _on_gpu(*(each.tensor for each in operations))
        return [PolledWork(work) for work in batch(operations)]

    class ProcessGroupGloo(dist.ProcessGroupGloo):
        def send(self, tensors, *args):
            return super().send(_on_cpu(tensors), *args)

        def recv(self, tensors, *args):
            return super().recv(_on_cpu(tensors), *args)

    def _on_cpu(tensors):
        if any(x.is_cuda for x in tensors):
            raise RuntimeError("ProcessGroupGloo::send: unsupported device cuda")
        return tensors

    dist.init_process_group = init_process_group
    dist.batch_isend_irecv, dist.broadcast = batch_isend_irecv, broadcast_
    dist.ProcessGroupGloo = ProcessGroupGloo
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 5)


# ---- installation ----
def unsupported_reason() -> str | None:
    """Return why the simulation does not support this version of torch, or None."""
    if torch.__version__.startswith(KNOWN_VERSIONS):
        return None
    return f"the simulated CUDA device knows torch {', '.join(KNOWN_VERSIONS)}x, not {torch.__version__}"


def install(gpus: int = 1) -> None:
    """Give this process simulated GPUs until it ends; with gpus = 0 torch reports that there is no GPU."""
    reason = unsupported_reason()
    if reason:
        raise RuntimeError(reason)
    SETTINGS.gpus = gpus
    _patch_cuda()
    _patch_distributed()
    torch.autocast = _Autocast
    Tensor.device = property(lambda self: META if _is_meta(self) else device_of(self) or CPU)
    Tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    Tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    Tensor.to, Tensor.cpu = _to, lambda self, **_: _to(self, CPU)
    Tensor.numpy, Tensor.tolist, Tensor.new_tensor = _numpy, _tolist, _new_tensor
    Tensor.pin_memory, Tensor.is_pinned = _pin_memory, is_pinned
    torch.UntypedStorage.clone = _clone_storage
    importlib.import_module("torch._decomp.decompositions_for_jvp")  # compiles torch functions, so before the patches

    for owner, names in ((torch, "zeros ones empty full rand randn randint"), (Tensor, "zeros ones empty full")):
        for name in names.split():
            full = f"{name}_like" if owner is torch else f"new_{name}"
            setattr(owner, full, _make_like(getattr(owner, full)))
    names = "zeros ones empty full rand randn randint randperm arange linspace eye from_numpy frombuffer triu_indices"
    for name in (*names.split(), "tensor", "as_tensor", "asarray"):
        setattr(torch, name, _make_factory(getattr(torch, name), name in ("tensor", "as_tensor", "asarray")))

    def bootstrap(self) -> None:
        with SimulatedCuda():
            _original.bootstrap(self)

    threading.Thread._bootstrap_inner = bootstrap
    SimulatedCuda().__enter__()


META = torch.device("meta")
_is_meta = Tensor.is_meta.__get__


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a program with simulated GPUs.")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--server-on-cpu", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    install(0 if asked.server_on_cpu and os.environ.get("RANK") == "0" else asked.gpus)
    sys.argv = [asked.program, *asked.arguments]
    if asked.module:
        runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(asked.program).parent))
        runpy.run_path(asked.program, run_name="__main__")


if __name__ == "__main__":
    # The program may import this file, and must get the module whose state the patches use.
    sys.modules["simulated_cuda"] = sys.modules["__main__"]
    main()
