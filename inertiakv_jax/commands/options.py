"""Options of a command: the fields of its dataclass, each described by the docstring behind it."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from typing import Any, get_type_hints

from tyro import MISSING
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

REGISTRY = ConstructorRegistry()
"""For ``tyro.cli``, whose own rule keeps a line break wherever the next line is indented."""


@REGISTRY.struct_rule
def _dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not dataclasses.is_dataclass(info.type):
        return None
    kind: Any = info.type
    if not kind.__module__.startswith("inertiakv_jax."):
        return None  # tyro has dataclasses of its own
    types = get_type_hints(kind, include_extras=True)
    fields = []
    for field in dataclasses.fields(kind):
        default = MISSING if field.default is dataclasses.MISSING else field.default
        if isinstance(info.default, kind):
            default = getattr(info.default, field.name)
        described = functools.partial(_description, kind, field.name)
        fields.append(StructFieldSpec(field.name, types[field.name], default, described))
    return StructConstructorSpec(instantiate=kind, fields=tuple(fields))


def _description(kind: type, field: str) -> str | None:
    return _docstrings(kind).get(field)


@functools.cache
def _docstrings(kind: type) -> dict[str, str]:
    """Field -> the docstring behind it, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
