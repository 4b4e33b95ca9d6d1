"""LongBench, its length-balanced version LongBench-E, and the eight tasks of the paper.

Prompts and generation lengths are those of the official ``config/dataset2prompt.json`` and
``dataset2maxlen.json``; a test compares their hash. Few-shot and code tasks go without a chat
template, as there. Source: Bai et al. 2023, arXiv 2308.14508.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from inertiakv_jax.eval import metrics
from inertiakv_jax.eval.tasks.task import Example, Request, Scores, Task, limited

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words."
)
_STORY = (
    "answer the question based on the story as concisely as you can, using a single phrase if "
    "possible. Do not provide any explanation."
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide '
    "any explanation."
)
_MULTI_DOCUMENT = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}\n\n"
    "Question: {input}\nAnswer:"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One task's prompt, with {context} and {input}, metric and generation length."""

    prompt: str
    metric: Callable[..., float]
    new_tokens: int
    few_shot: bool = False


_QA, _QA_ZH = metrics.qa_f1, metrics.qa_f1_zh
_ROUGE, _ROUGE_ZH = metrics.rouge_l, metrics.rouge_l_zh

SPECS = {
    "narrativeqa": Spec(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question as concisely as you can, using a single phrase if possible. Do not "
        f"provide any explanation.\n\nStory: {{context}}\n\nNow, {_STORY}\n\n"
        "Question: {input}\n\nAnswer:",
        _QA,
        128,
    ),
    "qasper": Spec(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        "Article: {context}\n\n Answer the question based on the above article "
        f"{_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
        _QA,
        128,
    ),
    "multifieldqa_en": Spec(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        _QA,
        64,
    ),
    "multifieldqa_zh": Spec(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，"
        "只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        _QA_ZH,
        64,
    ),
    "hotpotqa": Spec(_MULTI_DOCUMENT, _QA, 32),
    "2wikimqa": Spec(_MULTI_DOCUMENT, _QA, 32),
    "musique": Spec(_MULTI_DOCUMENT, _QA, 32),
    "dureader": Spec(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        _ROUGE_ZH,
        128,
    ),
    "gov_report": Spec(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        _ROUGE,
        512,
    ),
    "qmsum": Spec(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        _ROUGE,
        512,
    ),
    "multi_news": Spec(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        _ROUGE,
        512,
    ),
    "vcsum": Spec(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n"
        "会议总结：",
        _ROUGE_ZH,
        512,
    ),
    "trec": Spec(
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        metrics.classification,
        64,
        few_shot=True,
    ),
    "triviaqa": Spec(
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}",
        _QA,
        32,
        few_shot=True,
    ),
    "samsum": Spec(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        _ROUGE,
        128,
        few_shot=True,
    ),
    "lsht": Spec(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        metrics.classification,
        64,
        few_shot=True,
    ),
    "passage_count": Spec(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        "there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, "
        "and so on.\n\nThe final answer is: ",
        metrics.count,
        32,
    ),
    "passage_retrieval_en": Spec(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer "
        'format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        metrics.retrieval,
        32,
    ),
    "passage_retrieval_zh": Spec(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"'
        "等格式\n\n答案是：",
        metrics.retrieval_zh,
        32,
    ),
    "lcc": Spec(
        "Please complete the code given below. \n{context}Next line of code:\n",
        metrics.code_similarity,
        64,
    ),
    "repobench-p": Spec(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        metrics.code_similarity,
        64,
    ),
}

PAPER = (
    *("hotpotqa", "2wikimqa", "qasper", "musique", "gov_report", "multi_news", "qmsum"),
    "passage_retrieval_en",
)
"""The tasks of arXiv 2609.03515."""

E_TASKS = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)

_WITHOUT_CHAT = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
"""Better off without a chat template, says the official script."""


def length_bucket(words: int) -> str:
    """LongBench-E's three buckets, by length in words.

    >>> length_bucket(3999), length_bucket(4000), length_bucket(8000)
    ('0-4k', '4-8k', '8k+')
    """
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


def _examples(name: str, file: str, request: Request) -> list[Example]:
    rows = limited(request.sources.longbench(file), request.samples)
    return [_example(name, file, index, row) for index, row in enumerate(rows)]


def _example(name: str, file: str, index: int, row: dict[str, Any]) -> Example:
    for field, kind in (("input", str), ("context", str), ("answers", list), ("length", int)):
        if not isinstance(row.get(field), kind):
            got = f"{row.get(field)!r:.40}"
            raise ValueError(f"{file}, row {index}: {field} must be {kind.__name__}, got {got}")
    spec = SPECS[name]
    return Example(
        task=file,
        index=index,
        prompt=spec.prompt.format(context=row["context"], input=row["input"]),
        references=tuple(str(answer) for answer in row["answers"]),
        max_new_tokens=spec.new_tokens,
        chat=name not in _WITHOUT_CHAT,
        truncation="halves",
        ends_line=name == "samsum",
        tags={"bucket": length_bucket(row["length"])},
        classes=tuple(row.get("all_classes") or ()),
    )


def _score(name: str, example: Example, prediction: str) -> Scores:
    spec = SPECS[name]
    if spec.few_shot:
        prediction = metrics.first_line(prediction)
    metric = spec.metric
    if metric is metrics.classification:
        metric = functools.partial(metric, classes=example.classes)
    return {spec.metric.__name__: metrics.best(metric, prediction, example.references)}


def _task(name: str, benchmark: str, file: str) -> Task:
    return Task(
        name=file,
        benchmark=benchmark,
        examples=functools.partial(_examples, name, file),
        score=functools.partial(_score, name),
    )


TASKS = [_task(name, "longbench", name) for name in SPECS]
TASKS += [_task(name, "longbench-e", f"{name}_e") for name in E_TASKS]

GROUPS = {
    "longbench": tuple(SPECS),
    "longbench-paper": PAPER,
    "longbench-e": tuple(f"{name}_e" for name in E_TASKS),
}
