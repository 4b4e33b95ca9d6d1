"""``inertiakv demo``: what is watched, the table, and the picture."""

import dataclasses
import io
import re

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from rich.cells import cell_len

import inertiakv_jax as ikv
from inertiakv_jax import demo, demo_figure
from inertiakv_jax.commands import bench_report
from inertiakv_jax.demo import STEPS, Answer, Question, is_right
from inertiakv_jax.prose import planted_text


@pytest.fixture(scope="module")
def lm(tiny_model):
    return ikv.load(tiny_model)


@pytest.fixture(scope="module")
def question(lm):
    planted = planted_text(300, 1, lambda text: len(lm.tokenizer(text)["input_ids"]))
    return demo.pose(lm, planted)


def test_mesh_of_the_model_is_passed_on(question, lm):
    rows = dataclasses.replace(lm, mesh=AbstractMesh((2,), ("data",)))
    with pytest.raises(ValueError, match="a batch of 1 must be divisible by mesh axis 'data', 2"):
        demo.watch(rows, question, ikv.policies.full())


def test_question_knows_where_the_number_is(question, lm):
    positions = question.number_positions
    assert lm.tokenizer.decode(question.token_ids[positions.start : positions.stop]) == (
        question.number
    )
    assert len(positions) in (5, 6, 7)  # 12 is one token of the tiny model
    assert len(question.token_texts) == len(question.token_ids)
    text = lm.tokenizer.decode(question.token_ids)
    assert text.startswith("<|im_start|>user A special magic number is hidden")
    assert re.search(
        r"text\?<\|im_end\|><\|im_start\|>assistant The special magic number for \w+ mentioned in "
        r"the provided text is$",
        text,
    )


@pytest.mark.parametrize("name", ["inertiakv", "lazy4", "score-free"])
def test_watching_an_evicting_policy(name, lm, question):
    length = len(question.token_ids)
    policy = ikv.policies.by_name(name, ratio=0.9)
    answer, state, _ = demo.watch(lm, question, policy)
    kept = length - -(-9 * length // 10)
    assert answer.held.shape == (STEPS + 1, length + STEPS)
    assert answer.held[0].nonzero()[0].tolist() == list(range(length))
    assert (answer.held[1:].sum(axis=1) == kept).all()
    assert answer.kept_tokens == kept
    for step in range(1, STEPS + 1):
        new = length + step - 1
        assert not answer.held[step, new + 1 :].any()
        back = answer.held[step, :new] & ~answer.held[step - 1, :new]
        assert not back.any()  # what is evicted never comes back
    np.testing.assert_array_equal(
        np.sort(np.asarray(state.positions)[np.asarray(state.valid)]),
        answer.held[STEPS].nonzero()[0],
    )


def test_watching_a_policy_with_a_ranking_for_each_layer(lm, question):
    length = len(question.token_ids)
    answer, _, _ = demo.watch(lm, question, ikv.policies.by_name("tova", ratio=0.9))
    kept = length - -(-9 * length // 10)
    assert answer.kept_tokens == kept
    held = answer.held[1:].sum(axis=1)  # in either of two layers
    assert (held > kept).all()
    assert (held <= 2 * kept).all()


def test_watching_the_full_cache(lm, question):
    length = len(question.token_ids)
    answer, state, _ = demo.watch(lm, question, ikv.policies.full())
    assert answer.held.sum(axis=1).tolist() == [length + step for step in range(STEPS + 1)]
    assert answer.kept_tokens == length + STEPS
    assert answer.kv_bytes == state.kv_bytes()


def test_watched_answer_is_the_one_that_generate_gives(lm, question):
    policy = ikv.policies.lazy(4, 0.9)
    options = {"policy": policy, "max_new_tokens": STEPS + 1, "stop_at_eos": False}
    (tokens,) = ikv.generate(lm, [question.token_ids], **options).tokens
    end = next(i for i in range(5, STEPS) if tokens[i] not in tokens[:i])
    answer, _, _ = demo.watch(
        dataclasses.replace(lm, eos_token_ids=(tokens[end],)), question, policy
    )
    assert answer.steps == end
    assert answer.text == lm.tokenizer.decode(tokens[:end], skip_special_tokens=True).strip()
    answer, _, _ = demo.watch(dataclasses.replace(lm, eos_token_ids=()), question, policy)
    assert answer.steps == STEPS
    assert answer.text == lm.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("1234567.", True),
        ("It is 1234567, of course", True),
        ("12345678", False),
        ("1234568 or 1234567", False),
        ("1,234,567", False),
        ("", False),
    ],
)
def test_right_answers(answer, right):
    assert is_right(answer, "1234567") is right


def test_demo_prints_four_rows_and_draws(inertiakv, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_report, "busy_cpus", lambda: 1.7)
    picture = tmp_path / "kept.png"
    done = inertiakv("demo", "--model", tiny_model, "--tokens", 200, "--output", picture)
    assert done.code == 0
    table, _, warning = done.out.partition("Other programs kept ")
    heading, *rows = table.splitlines()
    assert warning.startswith("1.7 of ")
    blank, last = warning.splitlines()[-2:]
    assert re.split(r"\s{2,}", heading) == [
        *("policy", "answer", "tokens kept", "KV MiB", "decode tokens/s")
    ]
    assert [row.split()[0] for row in rows] == ["full", "inertiakv", "lazy4", "score-free"]
    assert all(re.search(r" (right|wrong) +[\d,]+ +\d+\.\d +[\d.]+$", row) for row in rows)
    assert len({cell_len(row) for row in rows}) == 1
    assert (blank, last) == ("", f"Which tokens each policy kept: {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert list(tmp_path.iterdir()) == [picture]
    assert "Loading" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--tokens", "3000"], "exceed the model's 2048 positions"),
        (["--output", "no/folder/kept.png"], "the folder no/folder does not exist"),
        (["--output", "."], "--output must be a file, got the folder ."),
    ],
)
def test_bad_input_is_refused_before_anything_compiles(arguments, message, inertiakv, tiny_model):
    done = inertiakv("demo", "--model", tiny_model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def drawn(question, answers):
    from matplotlib.image import imread

    return imread(io.BytesIO(demo_figure.draw(question, answers, "Title")), format="png")


def some_answer(**changes) -> Answer:
    held = np.zeros((STEPS + 1, 100 + STEPS), np.bool_)
    held[0, :100] = True
    held[1:, 10:30] = True
    answer = Answer(
        policy=ikv.policies.inertiakv(0.8),
        text="1234567.",
        right=True,
        steps=10,
        kept_tokens=20,
        kv_bytes=2**20,
        held=held,
    )
    return dataclasses.replace(answer, **changes)


QUESTION = Question(
    token_ids=list(range(100)),
    token_texts=["word"] * 100,
    number="1234567",
    number_positions=range(25, 32),
)


def share(image, colour):
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.isclose(image[..., :3], wanted, atol=2 / 255).all(axis=-1).mean()


def test_picture_shows_what_is_kept_in_colours():
    image = drawn(QUESTION, [some_answer()])
    kept, gone = share(image, demo_figure.HELD), share(image, demo_figure.GONE)
    number, lost = share(image, demo_figure.NUMBER_HELD), share(image, demo_figure.NUMBER_GONE)
    # Of 148 positions, 15 are kept beside the 5 of the number, 2 of the number are lost.
    assert gone > kept > number > lost > 0
    nothing_held = some_answer(held=np.zeros((STEPS + 1, 100 + STEPS), np.bool_))
    image = drawn(QUESTION, [nothing_held])
    assert share(image, demo_figure.GONE) > gone
    assert share(image, demo_figure.HELD) < kept / 5  # the legend's


def test_picture_has_a_row_for_each_answer():
    one, four = drawn(QUESTION, [some_answer()]), drawn(QUESTION, [some_answer()] * 4)
    assert four.shape[0] > 2 * one.shape[0]
    assert four.shape[1] == one.shape[1] == 1950


def test_any_text_can_be_drawn():
    odd = "$x_ \x00 \n 数字 🙂 ^{" * 9
    question = dataclasses.replace(QUESTION, token_texts=["$\\frac", "é", "数", "\n"] * 25)
    drawn(question, [some_answer(text=odd, right=False), some_answer(text="")])


@pytest.mark.real_weights
@pytest.mark.slow
def test_smollm2_answers_right_with_the_full_cache(smollm2, inertiakv, tmp_path):
    picture = tmp_path / "kept.png"
    done = inertiakv("demo", "--output", picture)
    assert done.code == 0
    (planted,) = re.findall(r"a number for “\w+”, (\d{7})", done.err)
    rows = {row.split()[0]: row.split() for row in done.out.splitlines()[1:5]}
    assert list(rows) == ["full", "inertiakv", "lazy4", "score-free"]
    assert rows["full"][1:3] == [f"{planted}.", "right"]
    full_kept = int(rows["full"][3].replace(",", ""))
    assert 1050 < full_kept < 1200
    prompt = full_kept - STEPS
    for name in ("inertiakv", "lazy4", "score-free"):
        assert int(rows[name][-3]) == prompt - -(-9 * prompt // 10)
        assert float(rows[name][-2]) < 0.12 * float(rows["full"][-2])
    assert picture.stat().st_size > 20_000
