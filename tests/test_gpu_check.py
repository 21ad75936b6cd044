# SPDX-License-Identifier: MIT
"""gpu_check.py itself: on a CPU every line of it runs at a small shape; with a CUDA device it
runs as it stands."""
import inspect
import json
from pathlib import Path

import benchmark
import command_line
import gpu_check
import pytest
import torch
from helpers import VOCAB, M, Table, random_ids, tiny_qwen2
from waits import waits

import dlm_spec

CUDA = torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch sees no CUDA device here")
def test_a_llada_8b_decodes_on_a_cuda_device_in_four_minutes():
    result = gpu_check.main([])
    assert result["minutes"] < 4
    for row in result["rows"]:      # the count without a device leaves out nothing large
        assert row["driver_waits_per_forward"] <= 1.1 * row["waits_per_forward"] + 1, row


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_and_ends(capsys):
    assert gpu_check.main([]) is None
    assert capsys.readouterr().out == "skipped: torch sees no CUDA device here\n"


def test_on_a_cpu_it_runs_whole_at_a_small_shape(tmp_path, capsys):
    file = tmp_path / "out.json"
    result = gpu_check.main(["--device", "cpu", "--shape", "mini", "--gen-length", "4",
                             "--json", str(file)])
    assert json.loads(file.read_text()) == result
    assert {(r["sampler"], r["B"]) for r in result["rows"]} == {
        (name, B) for name in benchmark.SAMPLERS for B in (1, 4)}
    assert all(r["forwards"] > 0 and r["waits_per_forward"] > 0 for r in result["rows"])
    table = capsys.readouterr().out.splitlines()[1:-1]
    assert len(table) == 1 + len(result["rows"]) and len({len(line) for line in table}) == 1


def test_a_dual_view_without_its_correction_is_caught(monkeypatch):
    assert gpu_check.layer_error(torch.bfloat16, "cpu", H=2, L=40, d=64) < .02
    monkeypatch.setattr(dlm_spec.DualView, "correct", lambda self, out, *_: out)
    assert gpu_check.layer_error(torch.bfloat16, "cpu", H=2, L=40, d=64) > .5


@pytest.mark.parametrize("f, n", [
    (lambda x: bool(x.any()), 1), (lambda x: int(x.max()), 1), (lambda x: x.tolist(), 1),
    (lambda x: x.cpu(), 1), (lambda x: x.nonzero(), 1), (lambda x: x[x > 2], 1),
    (lambda x: torch.bincount(x), 1), (lambda x: torch.equal(x, x), 1), (lambda x: 3 in x, 1),
    (lambda x: torch.tensor([3, 4], device=x.device), 1), (lambda x: x.unique(), 1),
    (lambda x: x.__setitem__(x > 2, x[:1]), 1), (lambda x: x.__setitem__(x > 2, 0), 0),
    (lambda x: x.masked_fill(x > 2, 0), 0), (lambda x: x.masked_scatter(x > 2, x), 0),
    (lambda x: x[x.argsort()], 0), (lambda x: x.max() + x.sum(), 0),
    (lambda x: torch.where(x > 2, x, 0), 0), (lambda x: x[None] * 2, 0)],
    ids=["truth", "number", "tolist", "cpu", "nonzero", "mask", "bincount", "equal", "in",
         "upload", "unique", "put tensor", "put number", "masked_fill", "masked_scatter",
         "gather",
         "reductions", "where", "view"])
def test_what_makes_a_host_wait_is_counted_and_nothing_else(f, n):
    x = torch.arange(6)
    with waits() as found:
        f(x)
    assert found.total() == n, found


def test_compiled_layers_are_compiled_where_they_are_measured():
    """A forward that is watched for waits is not, nor is any after it."""
    graphs, d = [], dlm_spec.Denoiser(tiny_qwen2(1), M)
    torch._dynamo.reset()
    d.model.base_model.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    row, _ = gpu_check.measure(d, "llada", "llada", {}, [5], 8, count=False)
    assert graphs and row["waits_per_forward"] is None


@pytest.mark.parametrize("label, more", [
    *((label, {}) for label in benchmark.SAMPLERS),
    *(("dual_diffusion", dict(view=view)) for view in ("cover", "visible"))])
@pytest.mark.parametrize("shift", [False, True])
def test_a_forward_makes_the_host_wait_at_most_eight_times(label, more, shift):
    """For the rows that take part, the sizes of what is asked, the columns that are read, and
    whether the logits can be used. What happens once per block comes on top; and at the end
    the record of revisions is read, which waits for each forward and each token in it."""
    name, knobs = benchmark.SAMPLERS[label]
    d = dlm_spec.Denoiser(tiny_qwen2(2), M, shift=shift, eos_ids=(1, 2))
    knobs = knobs | more | (dict(threshold=.3) if name not in ("llada", "saber") else {})
    sampler = dlm_spec.SAMPLERS[name]
    with waits() as found:
        out = sampler(d, [*random_ids(1, 9), *random_ids(1, 5)], gen_length=48,
                      block_length=16, postpone_eos=True, early_stop=True,
                      **command_line.named_knobs(sampler, knobs))
    lines, first = inspect.getsourcelines(dlm_spec.revisions_of)
    record = sum(n for (line, _), n in found.items() if first <= line < first + len(lines))
    blocks, statistics = 3, dlm_spec.revision_statistics(out)
    assert found.total() - record <= 8 * (out.calls + blocks), found
    assert record <= 6 * out.calls + statistics["commits"] + statistics["events"], found


def test_waits_of_a_decode_have_lines_of_the_module():
    table = Table(torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0)))
    with waits() as found:
        dlm_spec.sample_llada(dlm_spec.Denoiser(table, M), [[1]], gen_length=8, steps=4)
    source = Path(dlm_spec.__file__).read_text().splitlines()
    assert found and all(0 < line <= len(source) for line, _ in found)


def test_the_benchmark_measures_settings_that_there_are():
    """The first one is what the others are divided by."""
    known = benchmark.experiments.settings()
    assert {*benchmark.SPEED} <= {*known} and benchmark.SPEED[0] == "one-per-forward"
    assert benchmark.spread([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]


def test_a_part_that_is_measured_again_leaves_the_others_as_they_are(tmp_path, monkeypatch):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"shape": "medium", "threads": 2, "kinds": {"plain": 1.0}}))
    monkeypatch.setattr(benchmark, "batch", lambda *_: [2.0, 1.0, 3.0])
    threads = torch.get_num_threads()
    with torch.no_grad():           # main changes both for its process
        benchmark.main(["--shape", "mini", "--device", "cpu", "--parts", "batch", "--threads", "1",
                        "--json", str(path)])
    torch.set_num_threads(threads)
    found = json.loads(path.read_text())
    assert (found["shape"], found["threads"], found["kinds"]) == ("medium", 2, {"plain": 1.0})
    assert found["batch"] == [2.0, 1.0, 3.0]
    assert found["measured_again"]["batch"]["threads"] == 1
