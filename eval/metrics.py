"""The benchmarks' metrics: a score in [0, 1] for one prediction, equal to the official script's.

Where an official script has a quirk that changes scores, the quirk is kept and said so, for only
then can numbers be compared with published ones. tests/evaluation/official_scores.json holds what
the scripts themselves gave.

Sources: LongBench ``metrics.py`` and ``eval.py``, LongBench-v2 ``pred.py`` (THUDM/LongBench);
RULER ``eval/synthetic/constants.py`` and ``eval/evaluate.py`` (NVIDIA/RULER).
"""

import difflib
import functools
import re
import string
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Metric = Callable[[str, str], float]
"""Prediction and one reference to a score in [0, 1]."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
_CHINESE_PUNCTUATION = _PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)
_CONTROL = re.compile(r"[\x00-\x1f]")


def best(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    """The highest score over the references, at least 0; 0 if there are none."""
    return max((float(metric(prediction, reference)) for reference in references), default=0.0)


def first_line(prediction: str) -> str:
    """What LongBench scores of few-shot tasks: the first line that is not empty."""
    return prediction.lstrip("\n").split("\n")[0]


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words, without case, punctuation and articles.

    >>> qa_f1("The answer is Paris.", "paris")
    0.5
    """
    return _f1(_words(prediction), _words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 of the words that jieba cuts Chinese text into, without punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F of the package ``rouge``, sentence by sentence; 0 where it gives up.

    It gives up on empty text and, by recursion, on a sentence pair of about a thousand words.
    """
    # The package computes three scores; the official script takes one of them.
    try:
        scores: Any = _rouge().get_scores([prediction], [reference], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return scores["rouge-l"]["f"]


def rouge_l_zh(prediction: str, reference: str) -> float:
    """``rouge_l`` of the words that jieba cuts Chinese text into."""
    cut = _jieba().cut
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the prediction), if the right one is among them.

    A class that is only a part of the right one's name does not count, except that after each
    such class the next one named is not looked at: the official script takes them from the list
    that it is walking along.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            named.remove(named[place])
        place += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Fraction of the numbers in the prediction that are the right one, as written."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """``count`` of the number in "Paragraph 7"."""
    return count(prediction, re.findall(r"Paragraph (\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str) -> float:
    """``count`` of the number in "段落7"."""
    return count(prediction, re.findall(r"段落(\d+)", reference)[0])


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity, in whole percents, of the first line that is no comment or markdown.

    What ``fuzzywuzzy.fuzz.ratio`` computes where python-Levenshtein is not installed, as in the
    official requirements.
    """
    lines = prediction.lstrip("\n").split("\n")
    marks = ("`", "#", "//")
    line = next((line for line in lines if not any(mark in line for mark in marks)), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER: fraction of the references that the prediction contains, without case."""
    text = _printable(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER's qa: 1 if the prediction contains any of the references, without case."""
    text = _printable(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def choice_letter(response: str) -> str | None:
    """LongBench-v2: the letter in "The correct answer is (B)", or None.

    >>> choice_letter("**The correct answer is B**"), choice_letter("I think it is (B).")
    ('B', None)
    """
    response = response.strip().replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if match := re.search(pattern, response):
            return match[1]
    return None


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return (2 * precision * recall) / (precision + recall)


def _words(text: str) -> list[str]:
    text = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def _chinese_words(text: str) -> list[str]:
    words = []
    for word in _jieba().cut(text):
        kept = "".join(letter for letter in word.lower() if letter not in _CHINESE_PUNCTUATION)
        words.append("".join(kept.split()))
    return [word for word in words if word]


def _printable(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction.strip()).strip()


@functools.cache
def _rouge():
    from rouge import Rouge

    return Rouge()


@functools.cache
def _jieba():
    """The word cutter of Chinese text, with its dictionary read from the package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old syntax and pkg_resources; nothing of ours
        import jieba
    jieba.setLogLevel("WARNING")
    cutter: Any = jieba.Tokenizer()
    # It would keep its dictionary, marshalled, where anyone may have put another one: a file of
    # that name in the common folder for temporary files is loaded unseen.
    with tempfile.TemporaryDirectory() as folder:
        cutter.tmp_dir = folder
        cutter.initialize()
    return cutter
