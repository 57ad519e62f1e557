"""Mistakes that a GPU punishes, on the simulated one.  simulated_cuda.py --gpus 2 simulated_mistakes.py FILE

Writes {mistake: the error that it caused, "" if there was none} into FILE.
"""

import json
import sys
from pathlib import Path

import simulated_cuda
import torch
import torch.distributed as dist

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def cpu_and_gpu():
    torch.zeros(3, device=GPU) + torch.ones(3)


def a_number_on_the_cpu():
    assert (torch.zeros(3, device=GPU) + torch.tensor(1.0)).device == GPU  # CUDA takes one of no dimension


def a_number_on_the_gpu():
    torch.ones(3) * torch.tensor(2.0, device=GPU)


def a_product_with_a_number_on_the_cpu():
    torch.zeros(3, device=GPU).dot(torch.tensor(1.0))


def a_sum_on_the_cpu():
    total = torch.zeros(())
    total += torch.tensor(2.0, device=GPU)


def a_result_on_the_cpu():
    torch.add(torch.zeros(3, device=GPU), 1, out=torch.zeros(3))


def a_bound_on_the_cpu():
    torch.zeros(3, device=GPU).clamp(min=torch.tensor(0.0))


def numbers_drawn_on_the_cpu():
    torch.zeros(3, device=GPU) + torch.normal(0.0, 1.0, (3,))


def zeros_like_those_of_the_gpu():
    x = torch.zeros(3, device=GPU)
    x + torch.zeros_like(x, device="cpu")


def new_zeros_on_the_cpu():
    x = torch.zeros(3, device=GPU)
    x + x.new_zeros(3, device="cpu")


def two_gpus():
    torch.zeros(3, device=GPU).add_(torch.zeros(3, device=OTHER))


def rows_of_the_cpu_by_indices_on_the_gpu():
    torch.zeros(3)[torch.tensor([0], device=GPU)]


def rows_of_the_gpu_by_indices_on_the_cpu():
    assert torch.zeros(3, device=GPU)[torch.tensor([0])].device == GPU  # CUDA copies the indices


def a_thread_mixes():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cpu_and_gpu).result()


def a_thread_begins_on_the_first_gpu():
    from concurrent.futures import ThreadPoolExecutor

    torch.cuda.set_device(OTHER)
    try:
        x = torch.zeros(3, device="cuda")
        with ThreadPoolExecutor(1) as pool:
            x + pool.submit(torch.zeros, 3, device="cuda").result()
    finally:
        torch.cuda.set_device(GPU)


def a_backward_pass_mixes():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return g * torch.ones(3)

    Wrong.apply(torch.zeros(3, device=GPU, requires_grad=True)).sum().backward()


def vmap_mixes():
    torch.func.vmap(lambda x: x + torch.ones(3))(torch.zeros(2, 3, device=GPU))


def a_layer_on_the_cpu():
    torch.nn.Linear(3, 2)(torch.zeros(1, 3, device=GPU))


def generator_of_the_cpu():
    torch.rand(3, device=GPU, generator=torch.Generator())


def generator_of_the_cpu_in_place():
    torch.empty(3, device=GPU).normal_(generator=torch.Generator())


def numpy_of_the_gpu():
    torch.zeros(3, device=GPU).numpy()


def gpu_over_gloo():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group.send([torch.zeros(3, device=GPU)], 0, 0)


def cpu_over_nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    try:
        dist.broadcast(torch.zeros(3, device=GPU), 0)
        dist.broadcast(torch.zeros(3), 0)
    finally:
        dist.destroy_process_group()


def pinned_memory_on_the_gpu():
    torch.zeros(3, device=GPU).pin_memory()


def no_such_gpu():
    torch.zeros(3, device="cuda:2")


def no_deterministic_kernel():
    torch.use_deterministic_algorithms(True)
    try:
        torch.rand(3, device=GPU).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)


def no_deterministic_kernel_of_an_overload():
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.rand(3, 3, device=GPU)
        x.median()
        x.median(0)
    finally:
        torch.use_deterministic_algorithms(False)


def without_a_mistake():
    """What is allowed, and where its results lie."""
    x = torch.arange(6.0, device=GPU).view(2, 3)
    places = [x[0], x.T, x.clone(), x @ x.T, x.new_zeros(2), torch.zeros_like(x), x.sum(), x.to(OTHER).to(GPU)]
    assert {y.device for y in places} == {GPU}
    assert {x.cpu().device, x.to("cpu").device, torch.zeros(3).device} == {torch.device("cpu")}
    assert x.to(GPU) is x
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.rand(3, device=GPU)  # draws from the GPU's own generator
    assert torch.equal(before, torch.get_rng_state())


def other_devices_on_purpose():
    x, cpu = torch.zeros(3, device=GPU), torch.device("cpu")
    x[torch.tensor([0], device=GPU)] = torch.tensor(1.0)
    assert (x.type_as(torch.zeros(1)).device, torch.zeros(1).type_as(x).device) == (cpu, GPU)
    assert (x.new_ones(2, device="cpu").device, torch.zeros(2).new_ones(2, device=OTHER).device) == (cpu, OTHER)
    assert (torch.rand_like(x, device="cpu").device, torch.rand_like(x).device) == (cpu, GPU)
    assert (x.get_device(), torch.zeros(1).get_device()) == (0, -1)
    with torch.cuda.device(1):
        assert torch.zeros(3, device="cuda").device == OTHER
    with torch.device("cuda"):
        assert torch.zeros(3).device == GPU
    lengths = torch.tensor([3, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 4, device=GPU), lengths)
    assert torch.nn.utils.rnn.pad_packed_sequence(packed)[0].device == GPU
    weight = torch.nn.Parameter(torch.ones(3, device=GPU))
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.func.hessian(lambda w: w.pow(3).sum())(x)


def synchronisations():
    simulated_cuda.COUNTS.clear()
    simulated_cuda.WATCHED[:] = [__file__]
    x = torch.ones(3, device=GPU)
    x.add_(1).mul_(x)
    assert "sync" not in simulated_cuda.totals()
    x.sum().item()
    bool(x[0])
    x.cpu()
    x.tolist()
    x[x > 0].sum()
    torch.cuda.synchronize()
    assert simulated_cuda.totals()["sync"] == 6, simulated_cuda.totals()
    torch.ones(3).to(GPU, non_blocking=True)
    x.new_full((), 2.0)
    assert simulated_cuda.totals()["sync"] == 6, simulated_cuda.totals()
    torch.ones(3).to(GPU)  # ends when the GPU has done what it was asked for before
    x[:2] = torch.ones(2)
    x.new_tensor(2.0)
    assert simulated_cuda.totals()["sync"] == 9, simulated_cuda.totals()
    assert all(file == __file__ for _, file, _ in simulated_cuda.COUNTS)


def copied_without_a_wait():
    simulated_cuda.COUNTS.clear()
    x, place = torch.ones(2, device=GPU), torch.zeros(3, pin_memory=True)
    place[:2].copy_(x, non_blocking=True)
    x.zero_()
    assert "sync" not in simulated_cuda.totals()
    assert place[:2].isnan().all()
    torch.cuda.synchronize()
    assert place.tolist() == [1, 1, 0]
    copy = torch.ones(2, device=GPU).to("cpu", non_blocking=True)  # which PyTorch makes in pinned memory
    assert copy.isnan().all()
    assert simulated_cuda.totals()["sync"] == 1
    torch.cuda.synchronize()
    assert copy.tolist() == [1, 1]
    place.new_ones(3).copy_(torch.ones(3, device=GPU), non_blocking=True)  # without pinned memory CUDA waits
    assert simulated_cuda.totals()["sync"] == 3


def main():
    checks = (
        value for name, value in globals().items() if callable(value) and getattr(value, "__module__", "") == __name__
    )
    found = {}
    for check in checks:
        if check is main:
            continue
        try:
            check()
            found[check.__name__] = ""
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
