"""RULER and the needle grid: the official samples word for word, and what any sample must hold."""

import json
import random
import re

import pytest
from evaluation.conftest import needs

from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks import needle, ruler, ruler_lists, ruler_text
from inertiakv_jax.eval.tasks.catalogue import TASKS
from inertiakv_jax.eval.tasks.task import Request

needs("wonderwords")

LOREM = ("lorem", "ipsum", "dolor", "sit", "amet")
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with made-up essays, SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "ruler").mkdir()
    rng = random.Random(1)

    def prose(words):
        text = [rng.choice(LOREM) for _ in range(words)]
        return " ".join(w + "." if i % 9 == 8 else w for i, w in enumerate(text))

    def write(name, content):
        (folder / "ruler" / name).write_text(json.dumps(content))

    write("PaulGrahamEssays.json", {"text": prose(300)})
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"{prose(40)} The {a}{p} is gold.",
                    "qas": [
                        {"question": f"{a}{p}?", "answers": [{"text": "gold"}, {"text": "Gold"}]},
                        {"question": "none?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(7)
            ]
        }
        for a in range(5)
    ]
    write("squad.json", {"data": articles})
    questions = [
        {
            "question": f"q{q}?",
            "answer": "tin",
            "context": [[f"t{q}-{d}", [prose(30), " tin" if d == 3 else ""]] for d in range(10)],
            "supporting_facts": [[f"t{q}-3", 1]],
        }
        for q in range(6)
    ]
    write("hotpotqa.json", questions)
    return folder


def words(text):
    return len(text.split())


def request(data, **options):
    return Request(Sources(data), count_tokens=words, **{"samples": 4, **options})


def length_of(example):
    return words(example.prompt + example.answer_prefix) + example.max_new_tokens


@pytest.mark.parametrize("length", [1024, 3000, 5000])
@pytest.mark.parametrize("name", ruler.GENERATORS)
def test_sample_holds_its_answers_and_fits(name, length, data):
    examples = TASKS[name].examples(request(data, lengths=(length,)))
    assert [example.key for example in examples] == [f"{name}@{length}/{i}" for i in range(4)]
    for example in examples:
        assert example.max_new_tokens == NEW_TOKENS[name.split("_")[0]]
        assert length_of(example) <= length
        assert all(answer in example.prompt for answer in example.references[:1])
        assert TASKS[name].score(example, " ".join(example.references).upper()).popitem()[1] == 1.0
        assert TASKS[name].score(example, "nothing").popitem()[1] == 0.0


@pytest.mark.parametrize("name", ruler.GENERATORS)
def test_same_seed_same_samples_and_fewer_are_the_first_ones(name, data):
    def prompts(**options):
        return [e.prompt for e in TASKS[name].examples(request(data, lengths=(1500,), **options))]

    once = prompts()
    assert prompts() == once
    assert prompts(samples=2) == once[:2]
    if name != "qa_1":  # with all documents near enough nothing is drawn
        assert prompts(seed=43) != once


@pytest.mark.parametrize(
    ("name", "answers", "needles"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 1, 4),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_as_many_as_the_task_says(name, answers, needles, data):
    for example in TASKS[name].examples(request(data, lengths=(2000,))):
        assert len(example.references) == answers
        assert example.prompt.count("One of the special magic") == needles
        found = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", example.prompt)
        asked = example.prompt.rpartition("\n")[2]
        assert {v for key, v in found if key in asked} == set(example.references)


def test_variables_are_chained_and_differ_from_the_examples(data):
    for example in TASKS["vt"].examples(request(data, lengths=(1200,))):
        shown, _, asked = example.prompt.partition("\n\nMemorize")
        first, *rest = example.references
        assert re.search(rf"VAR {first} = (\d{{5}})\n", asked)
        for old, new in zip(example.references, rest, strict=False):
            assert f"VAR {new} = VAR {old} " in asked
        assert len(set(example.references)) == 5
        assert not set(example.references) & set(shown.split())


def test_common_words_are_the_most_common(data):
    (example,) = TASKS["cwe"].examples(request(data, lengths=(2000,), samples=1))
    listed = example.prompt.rpartition("most often.\n")[2].partition("\nQuestion")[0]
    counted = re.findall(r"\d+\. ([a-z\- ]+?)(?= \d+\.|$)", listed)
    times = {word: counted.count(word) for word in set(counted)}
    assert {word for word, count in times.items() if count == 6} == set(example.references)
    assert {count for word, count in times.items() if word not in example.references} == {1}


def test_frequent_words_follow_the_dots(data):
    (example,) = TASKS["fwe"].examples(request(data, lengths=(2000,), samples=1))
    coded = example.prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split(" ")
    ranked = sorted(set(coded), key=coded.count, reverse=True)
    assert (ranked[0], tuple(ranked[1:4])) == ("...", example.references)


def test_documents_that_hold_the_answer_stay_where_ten_do_not_fit(data):
    for name, gold in (("qa_1", "is gold."), ("qa_2", " tin")):
        for example in TASKS[name].examples(request(data, lengths=(200,))):
            assert gold in example.prompt
            assert 1 <= example.prompt.count("Document ") < 10


def test_questions_end_with_the_data(data):
    assert len(TASKS["qa_2"].examples(request(data, lengths=(2000,), samples=None))) == 6


@pytest.mark.parametrize("name", ["niah_multikey_1", "vt", "cwe", "fwe", "qa_2"])
def test_length_without_room_is_named(name, data):
    length = NEW_TOKENS[name.split("_")[0]] + 40
    said = "fwe needs at least 250" if name == "fwe" else ".*make it longer .eval's --lengths"
    with pytest.raises(ValueError, match=f"RULER's {name} at {length} tokens: {said}"):
        TASKS[name].examples(request(data, lengths=(length,)))


def test_chat_template_is_counted(data):
    (example,) = TASKS["niah_single_1"].examples(
        request(data, lengths=(1024,), samples=1, template_tokens=200)
    )
    assert 700 < length_of(example) <= 824


def test_word_pairs_are_the_sorted_list():
    adjectives, nouns = ("wide", "blue", "blue-eyed", "a", "ab", "wide"), ("cat", "eel", "zoo", "a")
    pairs = ruler_text.WordPairs(adjectives, nouns)
    full = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert [pairs[index] for index in range(len(pairs))] == full
    assert random.Random(3).choice(pairs) == random.Random(3).choice(full)
    assert len(ruler_text.word_pairs()) == 6175260  # 910 different adjectives x 6,786 nouns


def test_sentences_end_where_punkt_ends_them():
    text = 'He said "No." Then (it was 3.5 p.m. on May 1.) he left!No one saw. [1]It was Dr. Who?'
    assert ruler_text.sentences(text) == [
        'He said "No."',
        "Then (it was 3.5 p.m. on May 1.)",
        "he left!No one saw.",
        "[1]It was Dr. Who?",
    ]
    # Before a bracket that nothing separates from the next word, Punkt ends one, too.
    assert ruler_text.sentences("As those.)Thanks to") == ["As those.", ")Thanks to"]


def test_zeta_is_the_one_of_scipy():
    # scipy.special.zeta(2.0)
    assert ruler_lists.math.pi**2 / 6 == 1.6449340668482264


def test_needle_stands_at_its_depth(data):
    depths = (0, 25, 50, 100)
    examples = TASKS["needle"].examples(request(data, lengths=(800,), samples=2, depths=depths))
    assert [example.tags["depth"] for example in examples] == [*depths, *depths]
    for example in examples:
        assert 780 < length_of(example) <= 800
        body = example.prompt.partition("\n\n")[2].rpartition("\n\nWhat is")[0]
        before, _, after = body.partition("The best thing to do in")
        share = 100 * words(before) / (words(before) + words(after))
        assert share == pytest.approx(example.tags["depth"], abs=4)
    assert examples[0].prompt != examples[len(depths)].prompt


def test_needle_scores():
    made = TASKS["needle"].examples(
        Request(Sources(), words, lengths=(400,), haystack="noise", depths=(50,))
    )
    (example,) = made
    said = "Eat a sandwich and sit in Dolores Park on a sunny day. Or not."
    scores = TASKS["needle"].score(example, said)
    assert scores["contains"] == 1.0
    # Different words: 13 said, 11 asked for, 10 in common ("Eat" has another case).
    assert scores["rouge_l"] == pytest.approx(2 * 10 / (13 + 11), abs=1e-6)
    assert TASKS["needle"].score(example, "")["contains"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"haystack": "hay"}, "haystack must be one of essay, noise"),
        ({"depths": (50, 101)}, r"percent, 0 to 100, got \[101\]"),
        ({"samples": 11}, "there are 10 needles"),
    ],
)
def test_bad_grid_is_named(options, message, data):
    with pytest.raises(ValueError, match=message):
        TASKS["needle"].examples(request(data, lengths=(400,), **options))


@pytest.fixture(scope="module")
def official(shared_dir, tmp_path_factory):
    """RULER's sources as it names them, and the samples that its own scripts made of them."""
    source = shared_dir / "data" / "ruler"
    folder = tmp_path_factory.mktemp("official")
    (folder / "ruler").mkdir()
    for ours, theirs in (
        ("PaulGrahamEssays.json", "PaulGrahamEssays.json"),
        ("squad.json", "squad_from_xquad.json"),
        ("hotpotqa.json", "hotpotqa_sample100.json"),
    ):
        (folder / "ruler" / ours).symlink_to(source / theirs)
    return folder, source / "official_2048_smollm2"


@pytest.mark.shared
@pytest.mark.real_weights
@pytest.mark.parametrize("name", [name for name in ruler.GENERATORS if name != "qa_2"])
def test_samples_are_the_official_ones_word_for_word(name, official, smollm2):
    folder, samples = official
    lines = (samples / f"{name}.jsonl").read_text().splitlines()

    def count(text):
        return len(smollm2.tokenizer(text, add_special_tokens=False)["input_ids"])

    examples = TASKS[name].examples(
        Request(Sources(folder), count, lengths=(2048,), samples=len(lines))
    )
    for example, line in zip(examples, lines, strict=True):
        row = json.loads(line)
        assert example.prompt == row["input"]
        assert example.answer_prefix == row["answer_prefix"]
        assert list(example.references) == row["outputs"]
        text = example.prompt + example.answer_prefix
        assert count(text) + example.max_new_tokens == row["length"]


def test_the_ten_needles_differ():
    assert len({place for place, _ in needle.NEEDLES}) == 10
