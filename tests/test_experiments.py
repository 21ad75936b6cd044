"""The arithmetic of notebooks 03 and 04 (notebooks/mini/experiments.py), against values by
hand."""
import experiments
import pytest
import tasks
from evaluate import evaluate

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
    assert got.pop("nfe") == pytest.approx(want.pop("nfe"))
    assert got.pop("positions") == pytest.approx(want.pop("positions"))
    assert got == want and got["n"] == 6


def test_marks_at_a_cost_lie_between_the_nearest_settings():
    curve = [dict(nfe=8, marks="11"), dict(nfe=4, marks="01"), dict(nfe=2, marks="00")]
    assert experiments.marks_at(curve, "nfe", 5) == [.25, 1]
    assert experiments.marks_at(curve, "nfe", 2) == [0, 0]
    assert (
        experiments.marks_at(curve, "nfe", 9) is None is experiments.marks_at(curve, "nfe", 1)
    )


def test_a_paired_difference_and_its_interval():
    """Differences 1, 0, 0, 0: mean 25 points, deviation sqrt(3)/4, over sqrt(4)."""
    half = 100 * 1.96 * 3 ** .5 / 4 / 2
    assert experiments.paired("1111", [0, 1, 1, 1]) == pytest.approx(
        (25, 25 - half, 25 + half)
    )
