"""Every method on the simulated GPU (tests/simulated_cuda.py), whose kernels are those of the CPU."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env, launcher
from simulated_cuda import unsupported_reason

pytestmark = [
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
    pytest.mark.xdist_group("simulated cuda"),  # tests read one run of each set-up
]
SIMULATED, HERE = str(ROOT / "tests" / "simulated_cuda.py"), ROOT / "tests" / "jobs" / "gpu"
# Set-up: launcher and ranks; options of the simulated device; back end and device of every_method.py.
SET_UPS = {
    "the server on the GPU": (("alone", 1), [], ("auto", "cuda")),
    "three ranks share a GPU": (("torchrun", 3), [], ("auto", "cuda")),
    "rank 0 without a GPU": (("torchrun", 3), ["--gpus", "2", "--server-on-cpu"], ("auto", "cuda")),
    "NCCL": (("torchrun", 3), ["--gpus", "3"], ("nccl", "cuda")),
}
GRAPHS = "CUDA graphs"  # in the set-up "the server on the GPU"
# In `make test`: of each kind of message, state, phase and format one.
SOME = [
    *("fedavg", "scaffold", "feddyn", "fednova", "fedsol", "gradproj", "feduv", "fedsam", "ditto", "fedrep"),
    *("fedproto", "fedfomo", "fedala", "fedld", "moon", "pfedme", "fedatom_personal", "scaffold, int8"),
    *(
        "fedpac, fp16",
        "scaffold, sharded",
        "fedavg, median of shards",
        "fedavg, adamw kept, then nesterov",
    ),
]
# The host has to know the loss: from its eleventh pass on, FedALA's first learning may end after each. BatchNorm2d
# with momentum=None, torch's own code, reads its number of batches in each step.
STEPS_THAT_WAIT = {"fedavg, statistics over all batches"}
CLIENTS_THAT_WAIT = {*STEPS_THAT_WAIT, "fedala", "ccvr"}  # ccvr: in its last round, how many samples a class has


def run(words, **env):
    done = subprocess.run(
        [*words], env=clean_env(PYTHONPATH=str(ROOT), **env), capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory):
    """Return a function that runs cases of every_method.py in a set-up and returns their results.

    The set-up "cpu" is one process without the simulated device.
    """
    found = {}

    def make(set_up, cases=()):
        if (set_up, *cases) not in found:
            file = tmp_path_factory.mktemp("found") / "found.json"
            graphs = set_up == GRAPHS
            where = "the server on the GPU" if graphs else set_up
            start, options, kind = SET_UPS.get(where, (("alone", 1), None, ("auto",)))
            simulated = [] if options is None else [SIMULATED, *options]
            program = [*simulated, str(ROOT / "tests" / "every_method.py"), str(file), *kind]
            env = {"FEDMPI_CASES": "\n".join(cases), "FEDMPI_COMPUTE": json.dumps({"graphs": graphs})}
            run([*launcher(*start), sys.executable, "-W", "ignore", *program], **env)
            found[(set_up, *cases)] = json.loads(file.read_text())
        return found[(set_up, *cases)]

    return make


def are_close(x, y):
    """Return whether two JSON trees are equal up to rounding errors of their numbers."""
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(are_close(x[key], y[key]) for key in x)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(are_close, x, y))
    return x == pytest.approx(y, rel=1e-6) if isinstance(x, float) else x == y


def assert_bits_of_the_cpu(found, on_cpu):
    """Check that results have the bits of the CPU.

    Recorded norms of updates are only compared approximately: they are summed in float64 on a GPU, and in float32 on a
    CPU.
    """
    parts = ("w", "b", "server", "kept", "lines")
    assert found.keys() == on_cpu.keys()
    assert not [(case, part) for case in found for part in parts if found[case][part] != on_cpu[case][part]]
    assert not [case for case in found if not are_close(found[case]["rows"], on_cpu[case]["rows"])]


@pytest.mark.smoke
@pytest.mark.parametrize("set_up", ["the server on the GPU", "NCCL"])
def test_some_methods(run_cases, set_up):
    found = run_cases(set_up, SOME)
    assert len(found) == len(SOME)
    assert_bits_of_the_cpu(found, run_cases("cpu", SOME))


@pytest.mark.parametrize("set_up", SET_UPS)
def test_every_method(run_cases, set_up):
    assert_bits_of_the_cpu(run_cases(set_up), run_cases("cpu"))


def test_graphs_give_the_bits_of_ordinary_passes(run_cases):
    """Covers batch statistics, dropout, corrected and clipped gradients, other optimisers and several phases."""
    cases = [case for case in run_cases("cpu") if case not in STEPS_THAT_WAIT]
    on_cpu = run_cases("cpu")
    assert_bits_of_the_cpu(run_cases(GRAPHS, cases), {case: on_cpu[case] for case in cases})


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    file = tmp_path_factory.mktemp("waits") / "found"
    run([sys.executable, SIMULATED, str(HERE / "synchronisations.py"), str(file)])
    return json.loads(file.read_text())


def test_training_does_not_wait_for_the_gpu(waits):
    """No step makes the host wait; a client makes it wait once, when all of its work has been submitted."""
    found = waits["on the GPU"]
    assert {case for case, each in found.items() if each["steps"] > 0} == STEPS_THAT_WAIT
    assert {case for case, each in found.items() if each["a client"] > 1} == CLIENTS_THAT_WAIT
    assert all(each["a client"] == 1 for case, each in found.items() if case not in CLIENTS_THAT_WAIT)


def test_messages_on_the_cpu_cause_no_additional_waits(waits):
    """With gloo, uploads and downloads are copied without additional waits."""
    assert waits["over gloo"] == waits["on the GPU"]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    file = tmp_path_factory.mktemp("checks") / "found"
    run([sys.executable, "-W", "ignore", SIMULATED, "--gpus", "2", str(HERE / "simulated_checks.py"), str(file)])
    return json.loads(file.read_text())


@pytest.mark.smoke
def test_the_simulation_raises_cudas_errors_and_counts_waits(checks):
    assert checks["undetected_mistakes"] == {}
    assert checks["synchronisations"] == [0, *[1] * 8]


@pytest.mark.smoke
def test_sums_on_a_gpu_use_bounded_memory(checks):
    """A model of two blocks is summed while its uploads arrive, since a block is as wide as on a CPU.

    Copies in float64 are bounded, and a model is copied once for its hash.
    """
    assert checks["gather_classes"] == {"streamed": ["StreamingGather"], "local": ["ReducingGather"]}
    assert checks["scratch_memory"] <= 1 << 24
    assert checks["hash_of_a_model"]["download"] == 1
    seven, forty = checks["downloads_of_fedfomo"]  # which reads its table by rows
    assert seven == forty <= 2


def test_masked_sums_on_a_gpu_have_the_same_bits(checks):
    on_cpu, on_gpu = checks["hashes_with_secure_aggregation"]
    assert on_cpu == on_gpu


def test_noise_on_a_gpu_is_that_on_a_cpu(checks):
    of_clients, of_clients_on_gpu, of_samples, of_samples_on_gpu = checks["hashes_with_differential_privacy"]
    assert of_clients == of_clients_on_gpu
    assert of_samples == of_samples_on_gpu


@pytest.mark.smoke
def test_a_graph_is_one_launch_and_gives_the_same_bits(checks):
    found = checks["graph_results"]
    launches, fewer = found["launches"]
    assert found["same"]
    assert found["captured"] >= 1
    assert fewer < launches / 2
    assert checks["batch_norm_without_cudnn"] == [False, False, True]
    text = checks["message_about_a_model_that_cannot_be_captured"]
    assert "compute.graphs: true is not possible: the passes of this model cannot be captured as a CUDA graph" in text
    assert "operation not permitted when stream is capturing" in text


@pytest.mark.smoke
def test_clients_trained_together_do_not_wait_for_the_gpu(checks):
    """The host waits until the clients are trained; with messages on the CPU, it also waits for one copy."""
    found = checks["waits_of_a_pack"]
    assert found["waits"] == [0, 0]
    assert len({*found["models"]}) == 1
    (over_gloo, w), (on_gpu, same) = (checks["waits_for_uploads_of_a_pack"][messages] for messages in ("cpu", "cuda"))
    assert w == same
    assert (over_gloo, on_gpu) == ([2], [1])


@pytest.mark.smoke
def test_samples_reach_the_gpu_without_a_wait(checks):
    """Samples in memory are gathered once: 15.7 MB in 500 batches.

    Samples on disk are copied from pinned memory in small parts, so that training need not wait for all of them.
    """
    assert checks["launches_of_an_epoch"] == {"launch": 2, "same": True}
    found = checks["uploads_of_an_epoch"]
    assert found["same"]
    assert found["pinned"]
    assert found["counts"].get("upload", 0) <= 1  # of constants, once a process
    assert found["parts"] == 20


@pytest.mark.smoke
def test_buffers_for_copies_from_a_gpu_are_pinned(checks):
    (needed, taken, *are_pinned), (_, on_gpu, *not_there) = checks["pinned_memory"]
    assert taken == needed == on_gpu
    assert are_pinned == [True, True]
    assert not_there == [False, False]
