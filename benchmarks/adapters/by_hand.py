"""Run a plain loop in PyTorch, whose parameters and mean are lists of tensors."""

import sys
import time

import numpy as np
import torch
from task import images, model, parse_arguments, report
from torch.nn.functional import cross_entropy


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    (x, y), rng, seconds = images(task), np.random.default_rng(0), []
    module = model(sys.argv[1]).to(memory_format=torch.channels_last)
    p = list(module.parameters())
    w = [each.detach().clone() for each in p]
    for _ in range(rounds):
        began, total = time.perf_counter(), [torch.zeros_like(each) for each in w]
        for k in rng.choice(task["clients"], task["cohort"], replace=False):
            with torch.no_grad():
                torch._foreach_copy_(p, w)
            for rows in torch.randperm(task["samples"]).split(task["batch"]):
                grads = list(torch.autograd.grad(cross_entropy(module(x[k][rows]), y[k][rows]), p))
                with torch.no_grad():
                    torch._foreach_add_(p, grads, alpha=-task["lr"])
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(p, w))
        torch._foreach_add_(w, total, alpha=1 / task["cohort"])
        seconds.append(time.perf_counter() - began)
    report(seconds)


if __name__ == "__main__":
    main()
