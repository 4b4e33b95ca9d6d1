"""Tokens to text as they come in: what may be shown, and where a row ends."""

import pytest
from generation.scripted import ids_of, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax.text import RowText

TOKENIZER = tokenizer()


def pushed(text, stop=(), sizes=None):
    """A RowText that has got ``text`` in pieces of these sizes (one byte each), and its output."""
    row, ids, shown = RowText(TOKENIZER, stop), ids_of(text), []
    for size in sizes or [1] * len(ids):
        shown.append(row.push(ids[:size]))
        ids = ids[size:]
    shown.append(row.push((), end=True))
    return row, shown


def test_every_piece_is_shown_at_once():
    _, shown = pushed("abc", sizes=[1, 2])
    assert shown == ["a", "bc", ""]


def test_characters_are_held_back_until_complete():
    _, shown = pushed("é€😀x")
    assert shown == ["", "é", "", "", "€", "", "", "", "😀", "x", ""]


def test_a_character_that_never_completes_is_shown_at_the_end():
    row = RowText(TOKENIZER, ())
    assert row.push(ids_of("a€")[:3]) == "a"
    assert row.push((), end=True) == "\ufffd"
    assert row.text == "a\ufffd"


def test_a_broken_character_in_the_middle_is_shown():
    row = RowText(TOKENIZER, ())
    assert row.push([ids_of("é")[0], *ids_of("x")]) == "\ufffdx"


def test_special_tokens_are_not_text():
    row = RowText(TOKENIZER, ())
    assert row.push([*ids_of("a"), 2, *ids_of("b"), 0]) == "ab"
    assert len(row.tokens) == 4


def test_the_beginning_of_a_stop_string_is_held_back():
    row, shown = pushed("one EN two END three", stop=["END"])
    assert row.text == "one EN two "
    assert row.done
    assert "".join(shown) == row.text
    assert shown[4:7] == ["", "", "EN "]  # E, N, then a blank that is no D
    assert shown[11:] == [""] * 10


def test_tokens_end_where_the_stop_string_is_complete():
    for sizes in (None, [20], [13, 7], [12, 8]):
        row, _ = pushed("one EN two END three", stop=["END"], sizes=sizes)
        assert row.tokens == ids_of("one EN two END"), sizes


def test_what_was_held_back_is_shown_at_the_end():
    row, shown = pushed("so END", stop=["END!"])
    assert shown == ["s", "o", " ", "", "", "", "END"]
    assert not row.done


@pytest.mark.parametrize("stop", [["b", "cd"], ["cd", "b"], ["bcd", "b"], ["abc", "b"]])
def test_the_stop_string_that_is_complete_first_counts(stop):
    row, _ = pushed("abcd", stop, sizes=[4])
    assert row.text == "a"
    assert row.tokens == ids_of("ab")


def test_stop_string_in_the_middle_of_a_token():
    """One token may hold more than the stop string."""
    merged = TOKENIZER.convert_tokens_to_ids("Ġthe")
    row = RowText(TOKENIZER, ["t"])
    assert row.push([*ids_of("a"), merged, *ids_of("b")]) == "a "
    assert row.tokens == [*ids_of("a"), merged]


def test_a_stop_string_of_several_bytes_a_character():
    row, shown = pushed("a。b", stop=["。"])
    assert (row.text, "".join(shown)) == ("a", "a")


def test_nothing_is_added_after_the_end():
    row, _ = pushed("a.b", stop=["."])
    assert row.push(ids_of("more")) == ""
    assert row.text == "a"
    assert row.tokens == ids_of("a.")


@given(
    text=st.text(st.sampled_from("ab€😀."), max_size=12),
    stop=st.lists(st.text(st.sampled_from("ab€."), min_size=1, max_size=3), max_size=2),
    data=st.data(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pieces_are_the_text_up_to_the_first_stop(text, stop, data):
    left, sizes = len(text.encode()), []
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    row, shown = pushed(text, stop, sizes)
    for size in range(len(text) + 1):  # as if it came character by character
        expected = text[:size]
        ends = [place for s in stop if (place := expected.find(s)) >= 0]
        if ends:
            break
    assert row.text == expected[: min(ends, default=None)]
    assert "".join(shown) == row.text
    assert row.tokens == ids_of(expected)
    assert row.done == bool(ends)
    assert "\ufffd" not in "".join(shown)
