"""Trace files: written and read back, and refused where they are not what they should be."""

import copy
import json

import numpy as np
import pytest

from inertiakv_jax.diagnostics import Boundary, Trace, TracedRun, read_trace, to_json

NAN = float("nan")


def small_trace():
    """Three prompt tokens, two steps, a budget of two; by hand."""
    return Trace(
        config={"model": "tiny", "steps": 2},
        prompt=(5, 6, 7),
        continuation=(8, 9),
        full_chosen=np.array([9, 4], np.int32),
        runs=(
            TracedRun(
                name="one",
                policy={"name": "one", "ratio": 0.5},
                retention="shared",
                evicts=True,
                prompt_slots=4,
                slots=3,
                # Step 1 holds 0-3 and evicts 0 and 2; step 2 holds 1, 3, 4 and evicts 3.
                evicted_at=np.array([[[1, 3, 1, 2, 3]]], np.int32),
                chosen=np.array([9, 4], np.int32),
                chosen_logit=np.array([1.1, -2.5], np.float32),
                measures={"raw_churn": np.array([[NAN, NAN], [0.5, 0.25]])},
                boundary=Boundary(
                    positions=np.array([3, 1], np.int32),
                    utilities=np.array([[0.25, 0.125], [0.5, 0.75]]),
                    threshold=np.array([0.25, 0.5]),
                ),
            ),
            TracedRun(
                name="two",
                policy={"name": "two"},
                retention="per_layer",
                evicts=False,
                prompt_slots=5,
                slots=5,
                evicted_at=np.array([[[3, 3, 3, 3, 3]], [[0, 3, 3, 3, 3]]], np.int32),
                chosen=np.array([1, 4], np.int32),
                chosen_logit=np.array([1.0, 2.0], np.float32),
                measures={},
                boundary=None,
            ),
        ),
        kept_jaccard={("one", "two"): np.array([[0.5, 2 / 3], [0.4, 0.5]])},
    )


def test_kept_follows_from_when_tokens_went():
    one, two = small_trace().runs
    assert [np.flatnonzero(one.kept(step)[0, 0]).tolist() for step in range(3)] == [
        [0, 1, 2], [1, 3], [1, 4],
    ]  # fmt: skip
    assert [np.flatnonzero(two.kept(step)[1, 0]).tolist() for step in range(3)] == [
        [1, 2], [1, 2, 3], [1, 2, 3, 4],
    ]  # fmt: skip


def test_file_has_the_documented_schema():
    content = json.loads(to_json(small_trace()))
    assert {key: content[key] for key in ("format", "version", "prompt", "continuation")} == {
        "format": "inertiakv-trace", "version": 1, "prompt": [5, 6, 7], "continuation": [8, 9],
    }  # fmt: skip
    assert content["config"] == {"model": "tiny", "steps": 2}
    assert content["full_chosen"] == [9, 4]
    assert content["runs"][0] == {
        "name": "one",
        "policy": {"name": "one", "ratio": 0.5},
        "retention": "shared",
        "evicts": True,
        "prompt_slots": 4,
        "slots": 3,
        "evicted_at": [[[1, 3, 1, 2, 3]]],
        "chosen": [9, 4],
        "chosen_logit": [float(np.float32(1.1)), -2.5],
        "measures": {"raw_churn": [[None, None], [0.5, 0.25]]},
        "boundary": {
            "positions": [3, 1],
            "utilities": [[0.25, 0.125], [0.5, 0.75]],
            "threshold": [0.25, 0.5],
        },
    }
    assert content["kept_jaccard"] == [
        {"runs": ["one", "two"], "per_layer": [[0.5, 0.666667], [0.4, 0.5]]}
    ]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(to_json(small_trace()))
    found, expected = read_trace(path), small_trace()
    assert (found.prompt, found.continuation) == ((5, 6, 7), (8, 9))
    assert found.config == expected.config
    for ours, theirs in zip(found.runs, expected.runs, strict=True):
        for field in ("name", "policy", "retention", "evicts", "prompt_slots", "slots"):
            assert getattr(ours, field) == getattr(theirs, field)
        for field in ("evicted_at", "chosen", "chosen_logit"):
            one, other = getattr(ours, field), getattr(theirs, field)
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), field
        np.testing.assert_equal(dict(ours.measures), dict(theirs.measures))
    assert found.runs[1].boundary is None
    for field in ("positions", "utilities", "threshold"):
        np.testing.assert_array_equal(
            getattr(found.runs[0].boundary, field), getattr(expected.runs[0].boundary, field)
        )
    np.testing.assert_allclose(
        found.kept_jaccard["one", "two"], expected.kept_jaccard["one", "two"], atol=1e-6
    )
    assert to_json(found) == to_json(small_trace())


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(content):
        for key in keys:
            content = content[key]
        content[last] = value

    return change


RUN = ("runs", 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("format", "other"), 'expected an object with "format": "inertiakv-trace"'),
        (put("version", 2), "version must be 1, got 2"),
        (put("config", []), "config must be an object"),
        (put("prompt", []), "prompt must be lists of n integers"),
        (put("prompt", [1, "2"]), "prompt must be integers in 0 .. 2147483647"),
        (put("prompt", [1, -2]), "prompt must be integers in 0 .. 2147483647"),
        (put("prompt", [1.5]), "prompt must be integers"),
        (put("prompt", [True]), "prompt must be integers"),
        (put("prompt", [10**30]), "prompt must be integers"),
        (put("prompt", [[1], [2, 3]]), "prompt must be lists of n integers"),
        (put("prompt", {"a": 1}), "prompt must be lists of n integers"),
        (put("continuation", [8]), "evicted_at must be lists of n x n x 4 integers"),
        (put("full_chosen", [8]), "full_chosen must be lists of 2 integers"),
        (put("runs", {}), "runs must be a list of objects"),
        (put("runs", [1]), "runs must be a list of objects"),
        (put("runs", 1, "name", "one"), "runs must have distinct names"),
        (put(*RUN, "name", 3), "name must be a string, got 3"),
        (put(*RUN, "retention", "global"), "retention must be one of shared, per_layer, per_head"),
        (put(*RUN, "evicts", 1), "evicts must be true or false, got 1"),
        (put(*RUN, "slots", 0), "slots must be an integer from 1 on, got 0"),
        (put(*RUN, "slots", True), "slots must be an integer from 1 on, got True"),
        (put(*RUN, "prompt_slots", 2**40), "prompt_slots must be an integer from 1 on"),
        (put(*RUN, "evicted_at", [1, 3, 1, 2, 3]), "evicted_at must be lists of n x n x 5"),
        (put(*RUN, "evicted_at", [[[1, 3, 1, 2]]]), "evicted_at must be lists of n x n x 5"),
        (put(*RUN, "evicted_at", [[[1, 3, 1, 2, 4]]]), "evicted_at must be integers in 0 .. 3"),
        (put(*RUN, "evicted_at", [[[1, 3, 1, 0, 3]]]), "a token evicted before its own step"),
        (put(*RUN, "evicted_at", [[[1, 3, 1, 2, 1]]]), "a token evicted before its own step"),
        (put(*RUN, "evicted_at", [[[3, 3, 3, 3, 3]]]), "leaves 5 tokens in 3 slots at step 2"),
        (put(*RUN, "evicted_at", [[[3, 3, 1, 1, 3]]]), None),
        (put(*RUN, "prompt_slots", 3), "leaves 4 tokens in 3 slots at step 1"),
        (put(*RUN, "evicts", False), "must not change in a run that evicts nothing"),
        (put("runs", 1, "slots", 6), "must not change in a run that evicts nothing"),
        (put(*RUN, "chosen", [1]), "chosen must be lists of 2 integers"),
        (put(*RUN, "chosen_logit", ["a", "b"]), "chosen_logit must be numbers or null"),
        (put(*RUN, "chosen_logit", [1, 10**400]), "int too large|too large to convert"),
        (put(*RUN, "measures", []), "measures must be an object"),
        (put(*RUN, "measures", "raw_churn", [[1, 2]]), "raw_churn must be lists of 2 x n numbers"),
        (put(*RUN, "measures", "raw_churn", [[1], [{}]]), "raw_churn must be numbers or null"),
        (put(*RUN, "boundary", 7), "boundary must be an object or null, got 7"),
        (put(*RUN, "boundary", "threshold", [1]), "threshold must be lists of 2 numbers"),
        (put(*RUN, "boundary", "positions", [1]), "utilities must be lists of 1 x 2 numbers"),
        (put(*RUN, "boundary", "positions", [1, 5]), "positions must be integers in 0 .. 4"),
        (put("kept_jaccard", 0, "runs", ["one", "three"]), "kept_jaccard must be of two of the"),
        (put("kept_jaccard", 0, "runs", ["one"]), "kept_jaccard must be of two of the runs"),
        (put("kept_jaccard", 0, "per_layer", None), "per_layer must be lists of 2 x n numbers"),
    ],
)
def test_wrong_field_is_named(change, expected, tmp_path):
    content = copy.deepcopy(json.loads(to_json(small_trace())))
    change(content)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    if expected is None:
        read_trace(path)
        return
    with pytest.raises(ValueError, match=expected) as error:
        read_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is no trace"),
        (b"\xff\xfe\x00", "is no trace"),
        (b"[]", "expected an object"),
        (b'{"format": "inertiakv-trace", "version": NaN}', "NaN is no JSON"),
        (b"[" * 100_000, "is no trace"),
        (to_json(small_trace()).encode()[:-20], "is no trace"),
    ],
)
def test_what_is_no_json_is_refused(content, expected, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_trace(path)


def test_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("inertiakv_jax.diagnostics.trace_file.MAX_BYTES", 100)
    path = tmp_path / "trace.json"
    path.write_text(to_json(small_trace()))
    with pytest.raises(ValueError, match="at most 100 bytes"):
        read_trace(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the trace .*nowhere\.json: No such file"):
        read_trace(tmp_path / "nowhere.json")
