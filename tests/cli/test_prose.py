"""The demo's text: seeded, of the length asked for, one number in it."""

import itertools
import random
import re

import pytest

from inertiakv_jax.prose import TOPICS, planted_text, sentences


def count_words(text):
    return len(text.split())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_tokens", [1, 100, 1000, 5000])
def test_length(num_tokens, seed):
    length = count_words(planted_text(num_tokens, seed, count_words).text)
    assert num_tokens <= length <= num_tokens + 50  # the last sentence is finished


@pytest.mark.parametrize("seed", range(20))
def test_number_is_planted_once_in_the_middle(seed):
    planted = planted_text(800, seed, count_words)
    assert re.findall(r"\d+", planted.text) == [planted.number]
    assert re.fullmatch(r"[1-9]\d{6}", planted.number)
    assert planted.needle == (
        f"One of the special magic numbers for {planted.topic} is: {planted.number}."
    )
    assert planted.text.count(planted.needle) == 1
    before, after = planted.text.split(planted.needle)
    assert 0.15 < len(before) / len(planted.text) < 0.85
    assert re.search(r"[.\"] $", before)  # between two sentences
    assert re.match(r"\s+[A-Z\"]", after)
    assert planted.topic not in before + after


def test_question_and_answer_take_the_form_that_small_models_know():
    planted = planted_text(50, 3, count_words)
    question = (
        f"What is the special magic number for {planted.topic} mentioned in the provided text?"
    )
    assert planted.request.endswith(f"\n\n{planted.text}\n\n{question}")
    assert planted.answer_prefix == (
        f"The special magic number for {planted.topic} mentioned in the provided text is"
    )


def test_seed_decides_everything():
    texts = [planted_text(300, seed, count_words) for seed in range(30)]
    assert texts[4] == planted_text(300, 4, count_words)
    assert len({planted.number for planted in texts}) == 30
    assert {planted.topic for planted in texts} == set(TOPICS)


def test_prose_reads_as_prose():
    text = "".join(itertools.islice(sentences(random.Random(0)), 500))
    assert "{" not in text
    found = re.split(r"(?<=\.) (?=[A-Z\"])|(?<=\.\") |\n\n", text.strip())
    assert all(re.match(r"[A-Z\"].*[.\"]$", sentence) for sentence in found)
    assert len(set(found)) > 0.85 * len(found)  # hardly a sentence comes twice
    paragraphs = text.strip().split("\n\n")
    assert len(paragraphs) > 50


def test_no_tokens_is_refused():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        planted_text(0, 0, count_words)
