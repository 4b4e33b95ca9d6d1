"""All tasks by name, and groups of them."""

from collections.abc import Sequence

from inertiakv_jax.eval.tasks import longbench, longbench_v2, needle, ruler
from inertiakv_jax.eval.tasks.task import Task

_BENCHMARKS = (longbench, longbench_v2, ruler, needle)

TASKS: dict[str, Task] = {task.name: task for benchmark in _BENCHMARKS for task in benchmark.TASKS}
GROUPS: dict[str, tuple[str, ...]] = {
    name: members for benchmark in _BENCHMARKS for name, members in benchmark.GROUPS.items()
}


def tasks_named(names: Sequence[str]) -> list[Task]:
    """The tasks of names and of groups, each once, in the order given.

    Raises:
      ValueError: an unknown name (the known ones are listed), or none at all.

    >>> [task.name for task in tasks_named(["ruler-local", "vt"])][:4]
    ['niah_single_1', 'niah_multikey_2', 'niah_multikey_3', 'vt']
    """
    found: dict[str, Task] = {}
    for name in names:
        members = GROUPS.get(name, (name,))
        for member in members:
            if member not in TASKS:
                raise ValueError(
                    f"unknown task {name!r}; expected groups ({', '.join(GROUPS)}) or tasks "
                    f"({', '.join(TASKS)})"
                )
            found[member] = TASKS[member]
    if not found:
        raise ValueError("no task is named")
    return list(found.values())
