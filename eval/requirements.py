"""What the tasks of a run need of the extra 'eval': to be said before a model is loaded."""

import importlib.util

from inertiakv_jax.eval import metrics
from inertiakv_jax.eval.settings import Settings
from inertiakv_jax.eval.tasks import longbench, ruler_niah
from inertiakv_jax.eval.tasks.catalogue import tasks_named
from inertiakv_jax.eval.tasks.task import Task

_OF_METRICS = {
    metrics.rouge_l: {"rouge"},
    metrics.rouge_l_zh: {"rouge", "jieba"},
    metrics.qa_f1_zh: {"jieba"},
}


def check_packages(settings: Settings) -> None:
    """Raise ValueError if packages are missing that a task of the settings needs."""
    tasks = {task.name: packages(task, settings) for task in tasks_named(settings.tasks)}
    wanted = sorted(set().union(*tasks.values()))
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        for_these = [name for name, needed in tasks.items() if needed & set(missing)]
        raise ValueError(
            f"{', '.join(for_these)}: not installed: {', '.join(missing)}; "
            "pip install 'inertiakv-jax[eval]'"
        )


def packages(task: Task, settings: Settings) -> set[str]:
    """Import names of the packages that a task's samples, data or scores need."""
    if task.benchmark in ("longbench", "longbench-e"):
        return _OF_METRICS.get(longbench.SPECS[task.name.removesuffix("_e")].metric, set())
    from_hub = {"datasets"} if settings.data_dir is None else set()
    if task.benchmark == "needle":
        return {"rouge"} | (from_hub if settings.haystack == "essay" else set())
    if task.name in ("qa_1", "qa_2"):
        return from_hub
    if task.name == "cwe":
        return {"wonderwords"}
    if needles := ruler_niah.TASKS.get(task.name):
        words = {"wonderwords"} if needles.keys == "words" else set()
        return words | (from_hub if needles.haystack == "essay" else set())
    return set()
