"""Text to train on: cut up without overlap, shuffled without memory."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from training.tiny_lm import prose

from inertiakv_jax.training.text import Texts, cut, read_dataset, read_text


def test_pieces_follow_one_another(tiny_lm):
    text = prose(400)
    ids = tiny_lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = cut(tiny_lm, text, 64, 8)
    count = len(ids) // 64
    assert len(texts.held_out) == count // 10 >= 2
    assert np.concatenate([texts.training, texts.held_out]).ravel().tolist() == ids[: count * 64]
    assert texts.training.dtype == np.int32


def test_held_out_is_the_end_and_no_more_than_wanted(tiny_lm):
    assert len(cut(tiny_lm, prose(400), 64, 1).held_out) == 1
    two = cut(tiny_lm, "x" * 128, 64, 8)
    assert (len(two.training), len(two.held_out)) == (1, 1)


class WithFirstToken:
    """A tokenizer that begins every text with token 1, as those of Llama do."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [1] * add_special_tokens + [7 + ord(c) % 50 for c in text]}


def test_every_piece_begins_as_a_prompt_does(tiny_lm):
    lm = dataclasses.replace(tiny_lm, tokenizer=WithFirstToken())
    texts = cut(lm, "abcdefghi", 4, 1)
    everything = np.concatenate([texts.training, texts.held_out])
    assert everything[:, 0].tolist() == [1, 1, 1]
    assert everything[:, 1:].ravel().tolist() == [7 + ord(c) % 50 for c in "abcdefghi"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ("x" * 127, r"has 127 tokens, but needs at least 128: one piece of 64"),
    ],
)
def test_short_text_is_refused(text, message, tiny_lm):
    with pytest.raises(ValueError, match=message):
        cut(tiny_lm, text, 64, 8)


def test_tokens_outside_the_vocabulary_are_refused(tiny_lm):
    class Strange(WithFirstToken):
        def __call__(self, text, **options):
            return {"input_ids": [300] * 200}

    with pytest.raises(ValueError, match=r"300 \.\. 300, outside the vocabulary 0 \.\. 299"):
        cut(dataclasses.replace(tiny_lm, tokenizer=Strange()), "x", 64, 8)


def texts(count):
    return Texts(np.arange(count, dtype=np.int32)[:, None], np.zeros((1, 1), np.int32))


def test_each_pass_reads_every_text_once_in_its_own_order():
    stream = texts(7).batch(0, 21, seed=3).ravel()
    passes = stream.reshape(3, 7)
    assert [sorted(row) for row in passes.tolist()] == [list(range(7))] * 3
    assert len({tuple(row) for row in passes.tolist()}) == 3
    assert texts(7).batch(0, 7, seed=4).ravel().tolist() != passes[0].tolist()


@pytest.mark.parametrize("size", [1, 2, 5, 7, 16])
def test_batches_are_pieces_of_one_stream(size):
    whole = texts(7).batch(0, 48, seed=3).ravel().tolist()
    parts = [texts(7).batch(first, size, seed=3).ravel() for first in range(0, 48, size)]
    assert np.concatenate(parts)[:48].tolist() == whole


def test_text_files(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffÄ wörd".encode())
    assert read_text(path) == "Ä wörd"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not valid UTF-8"):
        read_text(path)
    for other, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"cannot read the text .*{reason}"):
            read_text(other)


def test_data_sets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    rows = [{"text": f"row {i}", "number": i} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = str(tmp_path)
    assert read_dataset(name, None, "train", "text") == "row 0\n\nrow 1\n\nrow 2\n\nrow 3\n\nrow 4"
    monkeypatch.setattr("inertiakv_jax.training.text.DATASET_CHARACTERS", 10)
    assert read_dataset(name, None, "train", "text") == "row 0\n\nrow 1"
    for column in ("body", "number"):
        with pytest.raises(ValueError, match=f"no texts in a column '{column}'.* text, number"):
            read_dataset(name, None, "train", column)
    with pytest.raises(ConnectionError, match="cannot read the data set"):
        read_dataset(str(tmp_path / "none"), None, "train", "text")
    with pytest.raises(ConnectionError, match="cannot read the data set"):
        read_dataset(name, None, "validation", "text")


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets: pip install .*\[eval\]"):
        read_dataset("anything", None, "train", "text")
