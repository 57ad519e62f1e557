"""What a user can do about errors of torch."""

import pytest

from fedmpi.common.blame import blaming, remedy
from fedmpi.common.errors import UserError


def test_a_kernel_that_has_no_deterministic_form():
    said = (
        "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
    )
    expected = (
        "compute.deterministic: adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation; "
        "take another layer or loss, or set it to false"
    )
    assert remedy(RuntimeError(said)) == expected
    with (
        pytest.raises(UserError, match=r"^round 0, client 2: .*: compute\.deterministic: adaptive"),
        blaming("round 0, client 2"),
    ):
        raise RuntimeError(said)
    assert remedy(UserError(f"round 0, client 2: {expected}")) is None  # it has been said


def test_products_of_matrices_that_were_told_too_late():
    """Torch looks for the variable at a process's first product on a GPU, which may be its user's own."""
    said = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
        "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment "
        "variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or ..."
    )
    with (
        pytest.raises(UserError, match=r"^round 0, client 2: .*compute\.deterministic: .*; set CUBLAS_WORKSPACE_CONF"),
        blaming("round 0, client 2"),
    ):
        raise RuntimeError(said)
