"""The reference of all settings as Markdown, read off the configuration's own classes: `outrider config reference`."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config.deployment import DeploymentConfig

PLAIN: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


def reference(model: type[BaseModel] = DeploymentConfig) -> str:
    """A section for each group of settings, a row for each setting: name, type, default, meaning."""
    sections = ["# Configuration reference", "", _introduction()]
    for path, group in groups(model):
        sections += ["", f"## {path or 'Top level'}", "", _first_sentences(group), ""]
        sections += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        meanings = descriptions(group)
        for name, field in group.model_fields.items():
            if _nested(field) is None or _optional(field):
                cells = (f"`{name}`", _type(field), _default(field), meanings.get(name, ""))
                sections.append("| " + " | ".join(cells) + " |")
    return "\n".join(sections) + "\n"


def groups(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The model and every model inside it, each with its dotted path."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = _nested(field)
        if inner is not None:
            yield from groups(inner, f"{path}.{name}" if path else name)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field, on one line; a subclass's own before its base's."""
    texts: dict[str, str] = {}
    for parent in reversed(model.__mro__):
        if issubclass(parent, BaseModel) and parent is not BaseModel:
            texts |= _attribute_docstrings(parent)
    return texts


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                texts[name] = " ".join(said.split())
    return texts


def _introduction() -> str:
    return (
        "Every setting of a deployment's YAML file, under `applications[0].args`, or at the top of a file without\n"
        "`applications`. Unknown keys are refused by name. Printed by `outrider config reference`."
    )


def _first_sentences(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _type(field: FieldInfo) -> str:
    bounds = [text for item in field.metadata if (text := _bound(item))]
    return _cell(_kind(field.annotation) + (f" ({', '.join(bounds)})" if bounds else ""))


def _kind(annotation: Any) -> str:
    """A type as a writer of YAML thinks of it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [text for item in inner[1:] for part in getattr(item, "metadata", [item]) if (text := _bound(part))]
        return _kind(inner[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(kind) for kind in inner)
    if origin is tuple:
        return "list of " + _kind(inner[0])
    if origin is dict:
        return f"mapping of {_kind(inner[0])} to {_kind(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    return PLAIN[annotation]


def _bound(item: Any) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "length ≥")):
        value = getattr(item, attribute, None)
        if value is not None:
            return f"{sign} {value}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if value in ((), {}):
        return "empty"
    return _cell(f"`{str(value).lower() if isinstance(value, bool) else value}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
