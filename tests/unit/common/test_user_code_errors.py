"""What a user can do about errors of torch."""

import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import add_error_context, explain_known_error

NO_DETERMINISTIC_KERNEL = (
    "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
)
CUBLAS_TOO_EARLY = (  # torch reads the variable at a process's first product on a GPU, which may be its user's own
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
    "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment "
    "variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or ..."
)


HELP = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("said", "sentence", "advice"),
    [
        (
            NO_DETERMINISTIC_KERNEL,
            "compute.deterministic: ",
            "use another layer or loss, or set compute.deterministic: false",
        ),
        (CUBLAS_TOO_EARLY, "compute.deterministic: ", "set CUBLAS_WORKSPACE_CONF"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "out of memory", "train.batch_size"),
        ("CUDA error: out of memory", "out of memory", "train.batch_size"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory", "fewer ranks"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out of memory", "fewer ranks"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "out of memory", "fewer ranks"),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "does not support",
            "compute.device=cpu",
        ),
        ("CUDA error: device-side assert triggered", "out of range, usually a label", "compute.device=cpu"),
        ("The NVIDIA driver on your system is too old (found version 12080).", "does not support", "install a build"),
        (
            "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
            "does not support",
            "install a build",
        ),
    ],
)
def test_errors_of_a_gpu_are_said_in_one_line_with_what_to_do(said, sentence, advice):
    """The words are those of torch 2.13 and of CUDA's cudaGetErrorString."""
    gpu_error = getattr(torch, "AcceleratorError", RuntimeError)  # older versions of torch have no class of its own
    with pytest.raises(UserError) as raised, add_error_context("round 3, client 2"):
        raise gpu_error(said + HELP) if said.startswith("CUDA error") else RuntimeError(said)
    assert explain_known_error(raised.value) is None  # it has been reported
    text = str(raised.value)
    assert text.startswith("round 3, client 2: ")
    assert "\n" not in text
    assert said in text
    before, _, after = text.partition(f"({said}); ")
    assert sentence in before
    assert advice in after


def test_other_errors_are_a_defect():
    assert explain_known_error(RuntimeError("CUDA error: an unknown one")) is None
    assert explain_known_error(ValueError("CUDA error: device-side assert triggered")) is None
