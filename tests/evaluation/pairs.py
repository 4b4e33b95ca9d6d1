"""300 predictions with references, plain and odd, the same ones on every machine."""

import random

ENGLISH = (
    "the a an of in Paris London river 12 7 storm Amelia Earhart opened bridge museum in 1937. "
    "Yes no unanswerable; Dr. O'Neil's well-known \"essay\" (draft) costs $5.00! "
    "cafe\u0301 na\u00efve Paragraph 12 Paragraph 3 answer: def return x=1 // # ` == "
    "\u00df \u0130stanbul e\u0301 \U0001f600 \t"
)
CHINESE = (
    "北京 是 中国 的 首都 ， 人口 很 多 。 答案 段落12 段落3 会议 讨论 了 预算 ！ "
    "“ 小明 ” 研究生 生命 起源 2020 年 Hello"
)
CLASSES = (
    "Food",
    "Date",
    "Number of something",
    "Number",
    "Invention, book and other creative piece",
    "Other",
    "Other location",
    "Other entity",
    "City",
)
ODD = (
    "",
    " ",
    ".",
    "...",
    "\n",
    "\n\n",
    "the",
    "\x00\x07",
    "\u200b",
    "12",
    "Paragraph 12",
    "A" * 300,
)


def pairs():
    """Dicts with prediction, references, and whether the text is Chinese."""
    rng = random.Random(20260903)
    rows = []
    for index in range(300):
        chinese = index % 3 == 2
        references = [_text(rng, chinese, index) for _ in range(rng.randint(1, 3))]
        prediction = _prediction(rng, chinese, index, references)
        rows.append({"prediction": prediction, "references": references, "chinese": chinese})
    return rows


def _text(rng, chinese, index):
    vocabulary = (CHINESE if chinese else ENGLISH).split(" ")
    length = 400 if index % 50 == 0 else rng.randint(1, 25)
    words = [rng.choice(vocabulary) for _ in range(length)]
    return ("" if chinese else " ").join(words)


def _prediction(rng, chinese, index, references):
    kind = index % 10
    if kind == 0:
        return rng.choice(ODD)
    if kind == 1:
        return references[-1]
    if kind == 2:
        return references[0].upper() + "!"
    if kind == 3:
        return "\n".join(["\n", "# a comment", "```python", references[0], "more"])
    if kind == 4:
        return ", ".join(rng.sample(CLASSES, 3)) + references[0]
    return (
        _text(rng, chinese, index)
        + rng.choice(["", " ", "\n", "\nDialogue: "])
        + references[0][:20]
    )


def long_pair():
    """One sentence pair that the package ``rouge`` gives up on: a thousand words each."""
    rng = random.Random(7)
    return tuple(" ".join(f"w{rng.randint(0, 50)}" for _ in range(1500)) for _ in range(2))


def responses():
    """Answers to LongBench-v2 questions."""
    return (
        "The correct answer is (A)",
        "**The correct answer is (B)**.",
        "The correct answer is C",
        "  The correct answer is *(D)*  ",
        "The correct answer is (E)",
        "the correct answer is (A)",
        "The correct answer is  (A)",
        "The correct answer is (insert answer here). The correct answer is (B).",
        "The correct answer is A, or The correct answer is (C)",
        "Because of (A), I choose (B).",
        "",
        "The correct answer is Apple",
        "The correct answer is (AB)",
    )
