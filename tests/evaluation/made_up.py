"""A run's folder with records made up, so that a report can be worked out by hand."""

import json

FULL, LAZY, TOVA = "full", "lazy4 ratio=0.5", "tova ratio=0.5"
SCORES = {  # variant -> group -> scores
    FULL: {"vt@1024": [1.0, 0.5], "cwe@1024": [1.0, 1.0]},
    LAZY: {"vt@1024": [0.5, 0.5], "cwe@1024": [1.0, 0.5]},
    TOVA: {"vt@1024": [0.0, 0.0], "cwe@1024": [0.5, 0.0]},
}
RATES = {FULL: 10.0, LAZY: 30.0, TOVA: None}


def record(variant, group, index, score, **fields):
    policy, _, ratio = variant.partition(" ratio=")
    evicted = 0 if policy == "full" else 500
    made = {
        "example": f"{group}/{index}",
        "variant": variant,
        "benchmark": "ruler",
        "group": group,
        "policy": policy,
        "options": {"ratio": float(ratio)} if ratio else {},
        "scores": {"string_match_all": score},
        "prediction": "</script><b>p</b>",
        "references": ["r"],
        "tags": {},
        "prompt_tokens": 900,
        "new_tokens": 101,
        "kept_tokens": 1000 - evicted,
        "evicted": evicted,
        "kept_fraction": 1 - evicted / 1000,
        "should_evict": policy != "full",
        "kv_bytes_full": 4 * 2**20,
        "kv_bytes_kept": 4 * 2**20 if policy == "full" else 2 * 2**20,
        "cost": {
            "batch": 1,
            "kv_bytes_allocated": 5 * 2**20,
            "prefill_s": 1.0 + index,
            "prefill_shared": True,
            "decode_s": 1.0,
            "decode_tokens_per_s": RATES[variant],
            "peak_bytes": {"device": None, "host": 2**30},
        },
    }
    return made | fields


def records():
    return [
        record(variant, group, index, score)
        for variant, groups in SCORES.items()
        for group, scores in groups.items()
        for index, score in enumerate(scores)
    ] + [
        record(
            variant,
            f"needle@{length}",
            index,
            score,
            benchmark="needle",
            scores={"rouge_l": score, "contains": float(score == 1.0)},
            tags={"depth": depth},
        )
        for variant, score in ((FULL, 1.0), (LAZY, 0.8), (TOVA, 0.2))
        for length in (1024, 2048)
        for index, depth in enumerate((0, 50.0))
    ]


DESCRIPTION = {
    "format": 1,
    "settings": {"model": "tiny<1>", "policies": ["lazy4", {"name": "tova"}, "full"]},
    "model": {"dtype": "float32", "config": {}},
    "examples": {
        "vt@1024": {"count": 2, "sha256": "0"},
        "cwe@1024": {"count": 2, "sha256": "0"},
        "needle@1024": {"count": 2, "sha256": "0"},
        "needle@2048": {"count": 2, "sha256": "0"},
    },
    "versions": {"jax": "0.10.2"},
    "device": {"platform": "cpu", "kind": "cpu", "count": 1},
    "report": {
        "name": "made up & small",
        "paper": [
            {"policy": "full", "benchmark": "ruler", "model": "L", "score": 94.59},
            {"policy": "lazy4", "ratio": 0.5, "benchmark": "ruler", "model": "L", "score": 75.45},
            {"policy": "kvzip", "ratio": 0.9, "benchmark": "ruler", "model": "L", "score": 86.44},
        ],
    },
}


def write_run(folder, made=None, description=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(description or DESCRIPTION))
    lines = [json.dumps(line) for line in (records() if made is None else made)]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return folder
