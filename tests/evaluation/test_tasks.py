"""Tasks: official prompts by hash, examples from data in the upstream formats, and prompt ids."""

import dataclasses
import hashlib
import json
import zipfile

import pytest
from evaluation.conftest import needs

from inertiakv_jax.eval import sources
from inertiakv_jax.eval.prompting import Prompting, shortened
from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks import longbench, longbench_v2, ruler_lists, ruler_niah, ruler_qa
from inertiakv_jax.eval.tasks.catalogue import TASKS, tasks_named
from inertiakv_jax.eval.tasks.task import Example, Request


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Of config/dataset2prompt.json at THUDM/LongBench 8ae23fd.
LONGBENCH_PROMPTS = {
    "narrativeqa": "5178f3835db90239",
    "qasper": "0fbdd123fe7f83d6",
    "multifieldqa_en": "20b4666a2de8a1f7",
    "multifieldqa_zh": "344b3a4e557cd547",
    "hotpotqa": "9ec4ae308865bd0c",
    "2wikimqa": "9ec4ae308865bd0c",
    "musique": "9ec4ae308865bd0c",
    "dureader": "ae53329f51b17908",
    "gov_report": "91c25d585b189ced",
    "qmsum": "dca23b678fe0183b",
    "multi_news": "2af3f28c40b902e6",
    "vcsum": "3e5d8241bc9b512e",
    "trec": "0eff8bebdba99d91",
    "triviaqa": "00a802e6377e72fc",
    "samsum": "a68d884234907eef",
    "lsht": "f3edabdf7fae53d6",
    "passage_count": "986550b6c61009c6",
    "passage_retrieval_en": "39b96b7fa52bdd2a",
    "passage_retrieval_zh": "c1e2346e245eb365",
    "lcc": "6a1f24cf0bb83cd9",
    "repobench-p": "ee9ec182ea5ffeb7",
}
LONGBENCH_NEW_TOKENS = {
    32: {
        *("triviaqa", "hotpotqa", "musique", "2wikimqa", "passage_count"),
        *("passage_retrieval_en", "passage_retrieval_zh"),
    },
    64: {"trec", "lsht", "multifieldqa_en", "multifieldqa_zh", "lcc", "repobench-p"},
    128: {"narrativeqa", "qasper", "dureader", "samsum"},
    512: {"gov_report", "qmsum", "vcsum", "multi_news"},
}


def test_longbench_prompts_and_lengths_are_the_official_ones():
    assert {name: sha(spec.prompt) for name, spec in longbench.SPECS.items()} == LONGBENCH_PROMPTS
    for new_tokens, names in LONGBENCH_NEW_TOKENS.items():
        assert {n for n, spec in longbench.SPECS.items() if spec.new_tokens == new_tokens} == names


def test_longbench_v2_prompts_are_the_official_ones():
    # Of prompts/0shot.txt, 0shot_cot.txt and 0shot_cot_ans.txt at THUDM/LongBench 072a5a7.
    assert [
        sha(t) for t in (longbench_v2.ZERO_SHOT, longbench_v2.COT, longbench_v2.COT_ANSWER)
    ] == [
        "68a162252bc9ff71",
        "6cc33d92fd8f6116",
        "85ec59df4ac0e27a",
    ]


def test_ruler_prompts_are_the_official_ones():
    # Of template + answer_prefix in scripts/data/synthetic/constants.py, marks filled with letters.
    filled = {"kind": "V", "context": "C", "query": "Q", "value": "Q", "count": "N"}
    ours = (
        *(ruler_niah.MANY, ruler_niah.ONE, ruler_lists.VT, ruler_lists.CWE, ruler_lists.FWE),
        ruler_qa.QA,
    )
    assert [sha("".join(parts).format(**filled)) for parts in ours] == [
        "fdca46da0c9ef817",
        "17be3d40ba5de933",
        "ab8650bdb63798eb",
        "6fdd67d5e5140c97",
        "cbf6e2c4e9cbf0e6",
        "b4d25d28a140b511",
    ]


ROW = {
    "input": "Who {x}?",
    "context": "Some text with {braces}.",
    "answers": ["A", "B"],
    "length": 4100,
    "dataset": "trec",
    "language": "en",
    "all_classes": ["A", "Ab"],
    "_id": "1",
}


def request(folder, **options):
    return Request(Sources(folder), count_tokens=lambda text: len(text.split()), **options)


def write_longbench(folder, name, *rows):
    path = folder / "longbench"
    path.mkdir(exist_ok=True)
    (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_longbench_row_becomes_an_example(tmp_path):
    write_longbench(tmp_path, "trec_e", ROW, ROW | {"length": 9000})
    first, second = TASKS["trec_e"].examples(request(tmp_path))
    assert first.prompt.endswith("Some text with {braces}.\nWho {x}?")
    assert (first.references, first.classes, first.chat) == (("A", "B"), ("A", "Ab"), False)
    assert (first.tags, second.tags) == ({"bucket": "4-8k"}, {"bucket": "8k+"})
    assert (first.key, second.key) == ("trec_e/0", "trec_e/1")
    assert len(TASKS["trec_e"].examples(request(tmp_path, samples=1))) == 1
    # Only the first line counts, and "Ab" is named, too.
    assert TASKS["trec_e"].score(first, "\nAb\nB") == {"classification": 0.5}


@pytest.mark.parametrize("field", ["input", "context", "answers", "length"])
def test_longbench_row_without_a_field_is_named(tmp_path, field):
    write_longbench(tmp_path, "trec", ROW, {k: v for k, v in ROW.items() if k != field})
    with pytest.raises(ValueError, match=f"trec, row 1: {field} must be"):
        TASKS["trec"].examples(request(tmp_path))


V2_ROW = {
    "context": " text ",
    "question": "Q?",
    "choice_A": "one",
    "choice_B": "two $C_C$",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "B",
    "difficulty": "easy",
    "length": "short",
}


def write_v2(folder, *rows):
    (folder / "longbench-v2").mkdir(exist_ok=True)
    (folder / "longbench-v2" / "data.json").write_text(json.dumps(rows))


def test_longbench_v2_asks_and_takes_the_letter(tmp_path):
    write_v2(tmp_path, V2_ROW)
    task = TASKS["longbench-v2"]
    (example,) = task.examples(request(tmp_path))
    assert "<text>\ntext\n</text>" in example.prompt
    assert "(B) two three\n(C) three" in example.prompt  # as the official chain of replacements
    assert example.max_new_tokens == 128
    assert task.score(example, "The correct answer is (B).") == {"accuracy": 1.0}
    assert task.score(example, "B") == {"accuracy": 0.0}


def test_chain_of_thought_has_a_second_turn_without_the_text(tmp_path):
    write_v2(tmp_path, V2_ROW)
    task = TASKS["longbench-v2-cot"]
    (example,) = task.examples(request(tmp_path))
    assert example.max_new_tokens == 1024
    assert task.follow_up is not None
    second = task.follow_up(example, " I think so. ")
    assert "The text is too long and omitted here." in second.prompt
    assert "Let’s think step by step: I think so.\n\nBased on" in second.prompt
    assert (second.max_new_tokens, second.key) == (128, example.key)


def test_longbench_v2_row_without_a_field_is_named(tmp_path):
    write_v2(tmp_path, V2_ROW, V2_ROW | {"answer": None})
    with pytest.raises(ValueError, match="row 1: answer must be texts"):
        TASKS["longbench-v2"].examples(request(tmp_path))


def test_missing_file_is_named_and_the_hub_is_not_asked(tmp_path):
    with pytest.raises(ValueError, match=r"has no longbench/trec\.jsonl"):
        TASKS["trec"].examples(request(tmp_path))


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff"])
def test_line_that_is_no_object_is_named(tmp_path, line):
    write_longbench(tmp_path, "trec", ROW)
    with (tmp_path / "longbench" / "trec.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"trec\.jsonl, line 2"):
        TASKS["trec"].examples(request(tmp_path))


def test_longbench_comes_out_of_the_hubs_archive(tmp_path, monkeypatch):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/trec.jsonl", json.dumps(ROW) + "\n")
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repository, name, repo_type: asked.append((repository, name, repo_type)) or archive,
    )
    assert Sources().longbench("trec") == [ROW]
    assert asked == [("zai-org/LongBench", "data.zip", "dataset")]


def test_hub_out_of_reach_is_a_connection_error(monkeypatch):
    def refuse(*_, **__):
        raise TimeoutError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ConnectionError, match=r"zai-org/LongBench.*no route.*--data-dir"):
        Sources().longbench("trec")


def test_rows_of_the_hub_become_squads_and_hotpotqas_own_formats(tmp_path, monkeypatch):
    needs("datasets")
    (tmp_path / "validation.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (
                {"title": "T", "context": "C1", "question": "q1", "answers": {"text": ["a"]}},
                {"title": "T", "context": "C1", "question": "q2", "answers": {"text": []}},
                {"title": "T", "context": "C2", "question": "q3", "answers": {"text": ["b", "c"]}},
            )
        )
    )
    monkeypatch.setattr(sources, "SQUAD", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    questions, documents = ruler_qa.read_squad(Sources())
    assert documents == ["C1", "C2"]
    assert [(q.query, q.answers, q.own, q.near) for q in questions] == [
        ("q1", ("a",), [0], [1]),
        ("q3", ("b", "c"), [1], [0]),
    ]
    row = {
        "question": "q",
        "answer": "a",
        "context": {"title": ["X", "Y"], "sentences": [["one", " two"], ["three"]]},
        "supporting_facts": {"title": ["Y"], "sent_id": [0]},
    }
    assert sources.hotpot_question(row) == {
        "question": "q",
        "answer": "a",
        "context": [["X", ["one", " two"]], ["Y", ["three"]]],
        "supporting_facts": [["Y", 0]],
    }


def test_groups_name_their_tasks_once():
    names = [task.name for task in tasks_named(["longbench-paper", "hotpotqa", "vt"])]
    assert names == [
        *("hotpotqa", "2wikimqa", "qasper", "musique", "gov_report", "multi_news", "qmsum"),
        *("passage_retrieval_en", "vt"),
    ]
    assert [len(tasks_named([g])) for g in ("longbench", "longbench-e", "ruler")] == [21, 13, 13]
    with pytest.raises(ValueError, match=r"unknown task 'lambada'.*longbench-paper.*hotpotqa"):
        tasks_named(["lambada"])
    with pytest.raises(ValueError, match="no task"):
        tasks_named([])


class Letters:
    """A tokenizer whose tokens are characters; "^" is its special first token."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in ("^" if add_special_tokens else "") + text]}

    def decode(self, ids, skip_special_tokens=False):
        text = "".join(map(chr, ids))
        return text.replace("^", "") if skip_special_tokens else text


@dataclasses.dataclass
class Model:
    max_positions: int


@dataclasses.dataclass
class FakeLM:
    model: Model
    tokenizer: Letters = dataclasses.field(default_factory=Letters)

    def chat_prompt(self, messages):
        return f"<{messages[0]['content']}>"


def example(prompt, **options):
    return Example("t", 0, prompt, ("a",), max_new_tokens=4, **options)


def text_of(prompting, asked):
    return "".join(map(chr, prompting.encode(asked)))


def test_official_truncations():
    assert shortened(Letters(), "abcdefghij", 20, "halves") == "abcdefghij"
    # "^abcdefghij" is 11 tokens; of 7, LongBench keeps 3 + 3 and LongBench-v2 3 + 4.
    assert shortened(Letters(), "abcdefghij", 7, "halves") == "ab" + "hij"
    assert shortened(Letters(), "abcdefghij", 7, "ends") == "ab" + "ghij"
    with pytest.raises(ValueError, match="no room"):
        shortened(Letters(), "abcdefghij", 1, "ends")


def test_prompt_is_wrapped_after_it_is_cut():
    asked = example("abcdefghij", truncation="halves", answer_prefix=" =")
    # 16 positions - 4 new tokens - 2 of the template; the prefix of two makes it cut once more.
    assert text_of(Prompting(FakeLM(Model(16))), asked) == "<abc" + "ghij> ="
    assert text_of(Prompting(FakeLM(Model(99))), asked) == "<abcdefghij> ="


def test_without_template_the_special_tokens_are_the_tokenizers():
    plain = Prompting(FakeLM(Model(99)), chat=False)
    assert text_of(plain, example("abc")) == "^abc"
    assert text_of(Prompting(FakeLM(Model(99))), example("abc", chat=False)) == "^abc"
    assert (plain.template_tokens, Prompting(FakeLM(Model(99))).template_tokens) == (0, 2)


def test_prompt_limit_of_the_user_counts_before_the_template():
    prompting = Prompting(FakeLM(Model(99)), max_prompt_tokens=6)
    assert text_of(prompting, example("abcdefghij", truncation="halves")) == "<ab" + "hij>"


def test_prompt_that_may_not_be_cut_must_fit():
    with pytest.raises(ValueError, match=r"t/0: a prompt of 12 tokens and 4 new ones exceed .* 15"):
        Prompting(FakeLM(Model(15))).encode(example("abcdefghij"))
