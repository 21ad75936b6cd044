"""The arithmetic of the experiments (notebooks/mini/experiments.py), against values by hand; the
ablations against their definition."""
import json
import random
from pathlib import Path

import command_line
import experiments
import pytest
import tasks
import torch
from evaluate import evaluate
from helpers import M, lively, random_ids, tiny_llama

import dlm_spec


def test_a_continued_record_is_that_of_one_run():
    d, problems = dlm_spec.load_denoiser(), tasks.problems("choice", "validation", 6)
    knobs = dict(gen_length=32, block_length=32, threshold=.5)
    parts = [
        evaluate(d, dlm_spec.sample_wino, p, **knobs) for p in (problems[:2], problems[2:])
    ]
    whole = evaluate(d, dlm_spec.sample_wino, problems, **knobs)
    got, want = dict(n=0, marks=""), experiments.together(dict(n=0, marks=""), whole)
    for part in parts:
        got = experiments.together(got, part)
    for record in (got, want):
        del record["seconds"]
    for mean in ("nfe", "positions", "tokens"):
        assert got.pop(mean) == pytest.approx(want.pop(mean))
    assert got == want and got["n"] == 6


def record(marks, clusters=None, **costs):
    """A record with these marks; every problem stands alone unless clusters are given."""
    return dict(marks=marks, clusters=clusters or range(len(marks)), n=len(marks),
                right=marks.count("1"), **costs)


def test_ablations_on_more_problems_do_not_hide_the_settings(tmp_path, monkeypatch):
    """One file holds the records of both, which may differ in their number of problems."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    some = [dict(name=name, exam=1, n=n, marks="1" * n, seconds=1.0)
            for name, n in (("cover.5", 2), ("no cap, 0.5", 3))]
    experiments.path_of("validation", "math").write_text(json.dumps(some))
    assert list(experiments.read("validation", "math")) == ["cover.5"]
    ablations = experiments.read("validation", "math", known=experiments.ablations())
    assert list(ablations) == ["no cap, 0.5"]


def test_a_paired_difference_and_its_interval():
    """Differences 1, 0, 0, 0, and with the two that are added 1 and -1: mean 25 points; the
    squares of the deviations from 1/6 sum up to 17/6. An interval has a width even when all
    marks agree, and one problem in four copies says no more than alone."""
    half = 100 * 1.96 * (17 / 6) ** .5 / 6
    want = pytest.approx((25, 25 - half, 25 + half))
    assert experiments.paired(record("1111"), record("0111")) == want
    d, low, high = experiments.paired(record("1111"), record("1111"))
    assert d == 0 and low == -high < -40
    marks = "".join(random.Random(1).choices("01", k=400)), "".join(
        random.Random(2).choices("01", k=400))
    alone = experiments.paired(*map(record, marks))
    copies = [record("".join(m * 4 for m in one), [i // 4 for i in range(1600)])
              for one in marks]
    assert experiments.paired(*copies) == pytest.approx(alone, abs=.1)


def test_the_interval_of_an_accuracy_is_wilson_s_of_the_problems_that_stand_alone():
    marks = "".join(random.Random(0).choices("01", k=90))
    for clusters, n in ((None, 90), ([i // 3 for i in range(90)], 90)):
        p, low, high = experiments.accuracy(record(marks, clusters))
        want = tasks.wilson(marks.count("1"), n)
        assert p == pytest.approx(100 * marks.count("1") / 90)
        if clusters is None:
            assert (low, high) == pytest.approx([100 * v for v in want])
    for n in range(1, 300):     # the interval holds the share itself, rounding or not
        for mark in "01":
            p, low, high = experiments.accuracy(record(mark * n))
            assert low <= p <= high and high - low > 1
    thrice = "".join(m * 3 for m in marks)
    got = experiments.accuracy(record(thrice, [i // 3 for i in range(270)]))
    assert got == pytest.approx(experiments.accuracy(record(marks)))


RECORDS = {"wino.6": record("1110", nfe=8, positions=90, cpu=3),
           "wino.4": record("1100", nfe=4, positions=70, cpu=2),
           "cover.5": record("1101", nfe=6, positions=60, cpu=4),
           "threshold.9": record("1111", nfe=9, positions=50, cpu=1)}


def test_the_best_other_decoder_costs_no_more():
    """By forwards COVER .5 meets WINO .4 alone; by positions threshold .9, by seconds that as
    well, as the most accurate."""
    got = [experiments.rivals(RECORDS, "cover.5", cost) for cost in ("nfe", "positions", "cpu")]
    assert got == ["wino.4", "threshold.9", "threshold.9"]
    assert experiments.rivals(RECORDS, "wino.4", "nfe") is None


def test_the_front_holds_what_nothing_beats():
    assert experiments.front(RECORDS, "nfe") == ["wino.4", "cover.5", "threshold.9"]
    assert experiments.front(RECORDS, "cpu") == ["threshold.9"]


def test_the_rule_that_chooses(monkeypatch):
    """Of 100 problems one fewer right is within a point, two fewer in one family are not; of
    what fits the one that takes least time in all; None where nothing fits."""
    def family(wrong, cpu):
        return record("0" * wrong + "1" * (100 - wrong), cpu=cpu)
    found = {"math": {"one-per-forward": family(5, 9), "wino.4": family(6, 1),
                      "wino.5": family(6, 2), "wino.6": family(0, 3), "saber2": family(0, 1)},
             "choice": {"one-per-forward": family(0, 9), "wino.4": family(2, 1),
                        "wino.5": family(1, 2), "wino.6": family(0, 3), "saber2": family(9, 1)}}
    found["code"] = found["math"]
    monkeypatch.setattr(experiments, "read", lambda split, family, length: found[family])
    assert experiments.choose() == {"LLaDA": "one-per-forward", "WINO": "wino.5", "Saber": None}


def test_prompts_of_one_program_and_problems_of_one_exam_are_clusters():
    code, exams = tasks.problems("code", "test", 300), tasks.exams("math", "test", 3)
    assert len({*experiments.clusters_of(code)}) == len({p.key for p in code}) < 300
    assert len({*experiments.clusters_of(tasks.problems("math", "test", 30))}) == 30
    assert experiments.clusters_of(exams) == [0] * 4 + [1] * 4 + [2] * 4


def test_the_table_of_the_readme_is_what_the_records_say():
    """If this fails: `python notebooks/mini/experiments.py summary`, and look at the words
    around it."""
    table = experiments.summary(experiments.README_ROWS, experiments.README_SPLIT)
    assert table in Path(experiments.HERE.parents[1], "README.md").read_text()


def test_what_the_pages_say_in_words_is_what_the_records_say():
    """The README's and the notebooks' findings. A claim that no longer holds is to be reworded."""
    found = {f: experiments.read("validation", f) for f in tasks.FAMILIES}

    def points(family, name, base="one-per-forward"):
        return experiments.paired(found[family][name], found[family][base])     # (d, low, high)

    def effective(name):
        e = [found[f][name]["revisions"] for f in found]
        return sum(r["effective_remasks"] for r in e) / sum(r["remasks"] for r in e)

    for family in found:    # Fast-dLLM's caches cost nothing that shows, and a rule by threshold
        _, low, high = points(family, "threshold.9-dual", "threshold.9")
        assert low <= 0 <= high
        assert points(family, "threshold.9-dual")[0] > -3
    for name in ("dkv.9", "dkv-one-per-forward"):       # dKV loses, with any rule
        assert points("code", name)[2] < -20 and points("math", name)[0] < -3
    for family in ("math", "code"):     # DualDiffusion repairs its drafts
        assert points(family, "dual_diffusion-kl-dkv", "dual_diffusion-trust-dkv")[1] > 5
        assert points(family, "dual_diffusion-token.9-dkv", "dual_diffusion-kl-dkv")[1] > 0
        # at one threshold looking again helps; without the override it helps more
        for name in ("cover.7", "wino.7"):
            assert points(family, name, "threshold.7")[0] > 0
        for t in (".5", ".7", ".8", ".9")[:1 if family == "math" else 4]:
            assert points(family, f"cover-masked{t}", f"cover{t}")[1] > 0
    for name in ("cover.9", "cover-two.9", "cover-masked.9"):   # better than one per forward
        assert points("math", name)[1] > 0
    assert points("code", "cover.9", "threshold.9")[2] < 0
    assert effective("saber2") < .05 < .25 < effective("wino.6") < .5
    assert min(map(effective, ("cover-few.7", "cover.7", "cover-masked.7"))) > .6
    parts = {f: experiments.read("validation", f, known=experiments.ablations())
             for f in ("math", "code")}
    for records in parts.values():
        def change(part, records=records):
            return experiments.paired(records[f"{part}, 4 seeds, 0.5"],
                                      records["nothing out, 4 seeds, 0.5"])
        assert max(change("random score")[2], change("inverted score")[2]) < 0
        assert all(abs(change(part)[0]) < 2 for part in ("u alone", "d_in", "d_out"))
    right, leaky = (parts["math"][f"{part} out, all seeds, 0.7"]["revisions"]
                    for part in ("nothing", "correction"))
    assert (leaky["effective_remasks"] / leaky["remasks"]
            < .5 * right["effective_remasks"] / right["remasks"])
    chosen = experiments.choose()
    assert chosen["COVER, all seeds"] is None is chosen["threshold"] is chosen["COVER, few seeds"]
    assert chosen["COVER, all seeds, no override"] == "cover-masked.9"


def test_every_setting_has_knobs_that_its_sampler_takes():
    """And no two settings are the same."""
    known = experiments.settings()
    for setting in known.values():
        sampler, knobs = dlm_spec.SAMPLERS[setting.sampler], dict(setting.knobs)
        knobs.pop("per_forward", None)
        command_line.named_knobs(sampler, knobs)
    assert len({str((s.sampler, s.knobs)) for s in known.values()}) == len(known)
    ablations = experiments.ablations()
    assert len({str(s.knobs) for s in ablations.values()}) == len(ablations)
    assert {s.knobs.get("without") for s in ablations.values()} == {None, *experiments.PATCHES}


def test_every_ablation_changes_the_decode():
    d = dlm_spec.Denoiser(lively(tiny_llama, 3, dtype=torch.float64), M)
    seen = []
    for part in (None, *experiments.PATCHES):
        patch = experiments.patch_of(part)
        with patch:
            out = dlm_spec.sample_cover(d, random_ids(4, 4), gen_length=40, block_length=40,
                                        threshold=.3, tau_remask=.9, max_seeds=4)
        seen.append(str((out.sequences.tolist(), out.nfe.tolist(), out.revisions)))
    assert len({*seen}) == len(seen)
