"""Mistakes that a GPU punishes, on the simulated one.  simulated_cuda.py --gpus 2 simulated_mistakes.py FILE

Writes {case: what is wrong with it, "" if it ends as it should} into FILE. A mistake's code stands on one line, what
its error says on the next.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import simulated_cuda
import torch
import torch.distributed as dist

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
MIXED = "Expected all tensors to be on the same device"
MISTAKES = """
torch.zeros(3, device=GPU) + torch.ones(3)
    MIXED
torch.ones(3) * torch.tensor(2.0, device=GPU)
    MIXED
torch.zeros(3, device=GPU).dot(torch.tensor(1.0))
    MIXED
torch.zeros(()).add_(torch.tensor(2.0, device=GPU))
    MIXED
torch.add(torch.zeros(3, device=GPU), 1, out=torch.zeros(3))
    MIXED
torch.zeros(3, device=GPU).clamp(min=torch.tensor(0.0))
    MIXED
torch.zeros(3, device=GPU) + torch.zeros_like(torch.zeros(3, device=GPU), device="cpu")
    MIXED
torch.zeros(3, device=GPU) + torch.zeros(3, device=GPU).new_zeros(3, device="cpu")
    MIXED
torch.zeros(3, device=GPU).add_(torch.zeros(3, device=OTHER))
    MIXED
ThreadPoolExecutor(1).submit(lambda: torch.zeros(3, device=GPU) + torch.ones(3)).result()
    MIXED
torch.func.vmap(lambda x: x + torch.ones(3))(torch.zeros(2, 3, device=GPU))
    MIXED
torch.nn.Linear(3, 2)(torch.zeros(1, 3, device=GPU))
    MIXED
a_backward_pass_mixes()
    MIXED
cpu_over_nccl()
    No backend type associated with device type cpu
torch.zeros(3)[torch.tensor([0], device=GPU)]
    indices should be either on cpu
torch.rand(3, device=GPU, generator=torch.Generator())
    Expected a 'cuda' device type for generator
torch.empty(3, device=GPU).normal_(generator=torch.Generator())
    Expected a 'cuda' device type for generator
torch.zeros(3, device=GPU).numpy()
    can't convert cuda:0 device type tensor to numpy
dist.ProcessGroupGloo(dist.HashStore(), 0, 1).send([torch.zeros(3, device=GPU)], 0, 0)
    unsupported device cuda
torch.zeros(3, device=GPU).pin_memory()
    only dense CPU tensors can be pinned
torch.zeros(3, device="cuda:2")
    invalid device ordinal
deterministic(lambda: torch.rand(3, device=GPU).cumsum(0))
    does not have a deterministic implementation
deterministic(lambda: torch.rand(3, 3, device=GPU).median(0))
    median_cuda does not have a deterministic implementation
"""


def deterministic(function):
    torch.use_deterministic_algorithms(True)
    try:
        function()
    finally:
        torch.use_deterministic_algorithms(False)


def a_backward_pass_mixes():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return g * torch.ones(3)

    Wrong.apply(torch.zeros(3, device=GPU, requires_grad=True)).sum().backward()


def cpu_over_nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    try:
        dist.broadcast(torch.zeros(3, device=GPU), 0)
        dist.broadcast(torch.zeros(3), 0)
    finally:
        dist.destroy_process_group()


def what_is_allowed():
    """And where its results lie."""
    x, cpu = torch.arange(6.0, device=GPU).view(2, 3), torch.device("cpu")
    places = [x[0], x.T, x.clone(), x @ x.T, x.new_zeros(2), torch.zeros_like(x), x.sum(), x.to(OTHER).to(GPU)]
    places += [x + torch.tensor(1.0), x[torch.tensor([0])], x.new_tensor(2.0), torch.rand_like(x)]  # CUDA copies these
    assert {y.device for y in places} == {GPU}
    assert {x.cpu().device, x.to("cpu").device, torch.zeros(3).device, x.new_ones(2, device="cpu").device} == {cpu}
    assert x.to(GPU) is x
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.rand(3, device=GPU)  # draws from the GPU's own generator
    assert torch.equal(before, torch.get_rng_state())
    with torch.cuda.device(1), ThreadPoolExecutor(1) as pool:
        assert torch.zeros(3, device="cuda").device == OTHER
        assert pool.submit(torch.zeros, 3, device="cuda").result().device == GPU  # of a new thread the first one
    lengths = torch.tensor([3, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 4, device=GPU), lengths)
    assert torch.nn.utils.rnn.pad_packed_sequence(packed)[0].device == GPU
    weight = torch.nn.Parameter(torch.ones(3, device=GPU))
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.func.hessian(lambda w: w.pow(3).sum())(x[0])


def synchronisations():
    simulated_cuda.COUNTS.clear()
    x = torch.ones(3, device=GPU)
    x.add_(1).mul_(x)
    assert "sync" not in simulated_cuda.COUNTS
    x.sum().item()
    bool(x[0])
    x.cpu()
    x.tolist()
    x[x > 0].sum()
    torch.cuda.synchronize()
    assert simulated_cuda.COUNTS["sync"] == 6, simulated_cuda.COUNTS
    torch.ones(3).to(GPU, non_blocking=True)
    x.new_full((), 2.0)
    assert simulated_cuda.COUNTS["sync"] == 6, simulated_cuda.COUNTS
    torch.ones(3).to(GPU)  # ends when the GPU has done what it was asked for before
    x[:2] = torch.ones(2)
    x.new_tensor(2.0)
    assert simulated_cuda.COUNTS["sync"] == 9, simulated_cuda.COUNTS


def copied_without_a_wait():
    simulated_cuda.COUNTS.clear()
    x, place = torch.ones(2, device=GPU), torch.zeros(3, pin_memory=True)
    place[:2].copy_(x, non_blocking=True)
    x.zero_()
    assert "sync" not in simulated_cuda.COUNTS
    assert place[:2].isnan().all()
    torch.cuda.synchronize()
    assert place.tolist() == [1, 1, 0]
    copy = torch.ones(2, device=GPU).to("cpu", non_blocking=True)  # which PyTorch makes in pinned memory
    assert copy.isnan().all()
    assert simulated_cuda.COUNTS["sync"] == 1
    torch.cuda.synchronize()
    assert copy.tolist() == [1, 1]
    place.new_ones(3).copy_(torch.ones(3, device=GPU), non_blocking=True)  # without pinned memory CUDA waits
    assert simulated_cuda.COUNTS["sync"] == 3


def main():
    found = {}
    lines = MISTAKES.strip().splitlines()
    for code, message in zip(lines[::2], lines[1::2], strict=True):
        message = message.strip().replace("MIXED", MIXED)
        try:
            eval(code)
            found[code] = "no error"
        except Exception as error:
            found[code] = "" if message in str(error) else f"{type(error).__name__}: {error}"
    for check in (what_is_allowed, synchronisations, copied_without_a_wait):
        try:
            check()
            found[check.__name__] = ""
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
