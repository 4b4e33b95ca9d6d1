"""The official scripts' scores on 300 pairs, recorded by running the scripts themselves."""

import json
from pathlib import Path

import pytest
from evaluation.conftest import needs
from evaluation.pairs import CLASSES, long_pair, pairs, responses

from inertiakv_jax.eval import metrics

needs("rouge", "jieba")

OFFICIAL = json.loads((Path(__file__).parent / "official_scores.json").read_text())
PAIRS = pairs()


def against_references(metric):
    return [metrics.best(metric, row["prediction"], row["references"]) for row in PAIRS]


def against(metric, reference, *options):
    return [float(metric(row["prediction"], reference, *options)) for row in PAIRS]


OURS = {
    "qa_f1": lambda: against_references(metrics.qa_f1),
    "qa_f1_zh": lambda: against_references(metrics.qa_f1_zh),
    "rouge_l": lambda: against_references(metrics.rouge_l),
    "rouge_l_zh": lambda: against_references(metrics.rouge_l_zh),
    "code_similarity": lambda: against_references(metrics.code_similarity),
    "count": lambda: against(metrics.count, "12"),
    "retrieval": lambda: against(metrics.retrieval, "Paragraph 12"),
    "retrieval_zh": lambda: against(metrics.retrieval_zh, "段落3"),
    "classification": lambda: against(metrics.classification, "Number of something", CLASSES),
    "classification_2": lambda: against(metrics.classification, "Other location", CLASSES),
    "first_line_rouge_l": lambda: against_references(
        lambda prediction, reference: metrics.rouge_l(metrics.first_line(prediction), reference)
    ),
    "string_match_all": lambda: [
        metrics.string_match_all(row["prediction"], row["references"]) for row in PAIRS
    ],
    "string_match_part": lambda: [
        metrics.string_match_part(row["prediction"], row["references"]) for row in PAIRS
    ],
}


def test_every_official_metric_is_compared():
    assert set(OURS) == set(OFFICIAL["scores"])
    assert len(PAIRS) == 300


@pytest.mark.parametrize("name", OURS)
def test_scores_equal_the_official_ones_to_the_last_bit(name):
    scores, official = OURS[name](), OFFICIAL["scores"][name]
    assert [i for i, (a, b) in enumerate(zip(scores, official, strict=True)) if a != b] == []


def test_rouge_gives_up_on_a_sentence_of_a_thousand_words_as_the_official_script_does():
    assert metrics.rouge_l(*long_pair()) == OFFICIAL["long_pair_rouge_l"] == 0.0


def test_choice_letters_equal_the_official_ones():
    letters = [metrics.choice_letter(response) for response in responses()]
    assert letters == OFFICIAL["choice_letters"]


def test_part_of_another_class_is_skipped_with_the_quirk_of_the_official_script():
    # "Other" is dropped, and "Food" after it is not looked at, though "Food" would not be dropped.
    named = "Other Food Other location"
    assert (
        metrics.classification(named, "Other location", ("Other", "Food", "Other location")) == 0.5
    )
    # Two parts in a row: the second stays, since the first was taken from before it.
    classes = ("Other", "location", "Other location")
    assert metrics.classification("Other location", "Other location", classes) == 0.5


def test_no_reference_scores_zero():
    assert metrics.best(metrics.qa_f1, "an answer", ()) == 0.0


def test_jieba_loads_no_dictionary_from_the_common_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "jieba.cache").write_bytes(b"planted")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    metrics._jieba.cache_clear()
    assert list(metrics._jieba().cut("北京是中国的首都")) == ["北京", "是", "中国", "的", "首都"]
    assert (tmp_path / "jieba.cache").read_bytes() == b"planted"
    assert [path.name for path in tmp_path.iterdir()] == ["jieba.cache"]
