"""JSON schemas of clients, rewritten before they become a grammar. Knows no request and no grammar.

A schema that is put inside another one keeps its references (`rebased`); objects hold the keys that are named and no
others (`closed`); keywords that only annotate are taken out, and those that cannot be followed are named
(`without_annotations`). Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""String formats that are enforced; any other is an annotation, as JSON Schema has it by default."""
UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that change what is allowed and that no grammar here can follow."""
MAX_PARTS = 20_000
_VACUOUS = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True, "not": False}
"""Values with which these keywords allow everything."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_OPENERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMPOSERS = ("allOf", "anyOf", "oneOf", "$ref")


def rebased(schema: Schema, place: str) -> Schema:
    """`schema` with its references as they must read when it stands at the pointer `place` of another document.

    Pointers, anchors and references by the schema's own $id are resolved in `schema`; $id and $schema, which make a
    document of their own, are left out.
    """
    own = schema.get("$id")
    anchors = {
        part[key]: pointer
        for pointer, part in _parts(schema)
        for key in ("$anchor", "$dynamicAnchor")
        if isinstance(part.get(key), str)
    }

    def moved(part: Schema) -> Schema:
        part = {key: value for key, value in part.items() if key not in ("$anchor", "$dynamicAnchor")}
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return part
        if isinstance(own, str) and own and reference.startswith(own.rstrip("#")):
            reference = "#" + reference[len(own.rstrip("#")) :].removeprefix("#")
        if reference.startswith("#"):
            pointer = anchors.get(reference[1:], reference[1:])
            part["$ref"] = f"#{place}{pointer}"
        return part

    return {key: value for key, value in _mapped(schema, moved).items() if key not in ("$id", "$schema")}


def without_annotations(schema: Schema) -> Schema:
    """`schema` without what only annotates, or allows everything. Raises ValueError that names a keyword and its place
    for what cannot be followed."""

    def plain(part: Schema) -> Schema:
        kept = {key: value for key, value in part.items() if key not in _VACUOUS or value is not _VACUOUS[key]}
        if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
            del kept["format"]
        if kept.get("unevaluatedProperties") is False and "additionalProperties" not in kept:
            del kept["unevaluatedProperties"]  # closed objects are what it asks for
        return kept

    rewritten = _mapped(schema, plain)
    for pointer, part in _parts(rewritten):
        for key in part:
            if key in UNSUPPORTED:
                raise ValueError(f"{key!r}, at {pointer or 'its top'}, is not supported")
    return rewritten


def closed(schema: Schema) -> Schema:
    """`schema` with no keys in its objects but those it names, where it does not say otherwise itself.

    An object without `properties`, a free mapping, stays open. Objects put together by allOf, anyOf, oneOf and $ref
    are closed around the names of all their parts. Raises ValueError for more parts than MAX_PARTS, references that
    are followed counted each time.
    """
    result: Schema = _Closer(schema).close(schema)
    return result


class _Closer:
    def __init__(self, document: Schema) -> None:
        self._document = document
        self._left = MAX_PARTS

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {MAX_PARTS} parts")

    def close(self, part: Any, beside: frozenset[str] = frozenset(), seen: tuple[str, ...] = ()) -> Any:
        """beside: names that other parts of the same object hold. seen: references followed on the way."""
        if not isinstance(part, dict):
            return part
        self._spend()
        composed = {key: part[key] for key in _COMPOSERS if key in part}
        result = _children(part, self.close, but=("allOf", "anyOf", "oneOf"))
        own = frozenset(part["properties"]) if isinstance(part.get("properties"), dict) else None
        named = {key: self._names({key: value}) for key, value in composed.items()}
        for key in ("allOf", "anyOf", "oneOf"):
            if not isinstance(part.get(key), list):
                continue
            around = beside | (own or frozenset()) | _union(names for other, names in named.items() if other != key)
            members = part[key]
            result[key] = [
                self.close(
                    member,
                    around | _union(self._names(m) for m in members if key == "allOf" and m is not member),
                    seen,
                )
                for member in members
            ]
        if "$ref" in part:
            around = beside | (own or frozenset()) | _union(n for other, n in named.items() if other != "$ref")
            target = self._target(part["$ref"])
            if around and isinstance(target, dict) and part["$ref"] not in seen:
                copy = self.close(target, around, (*seen, part["$ref"]))
                result.pop("$ref")
                result["allOf"] = [*result.get("allOf", []), copy]
        total = beside | _union(named.values())
        if own is not None and not any(key in part for key in _OPENERS):
            result["properties"] = {**result["properties"], **{name: {} for name in sorted(total - own)}}
            result["additionalProperties"] = False
        return result

    def _names(self, part: Any, seen: tuple[str, ...] = ()) -> frozenset[str]:
        """All names of properties that `part` gives to its object."""
        if not isinstance(part, dict):
            return frozenset()
        self._spend()
        names = frozenset(part["properties"]) if isinstance(part.get("properties"), dict) else frozenset()
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                names |= _union(self._names(member, seen) for member in part[key])
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            names |= self._names(self._target(reference), (*seen, reference))
        return names

    def _target(self, reference: Any) -> Any:
        """What a pointer leads to; None if it leads nowhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place: Any = self._document
        for escaped in unquote(reference[1:]).split("/")[1:]:
            step = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                place = place[int(step)]
            elif isinstance(place, dict) and step in place:
                place = place[step]
            else:
                return None
        return place


def _union(sets: Any) -> frozenset[str]:
    return frozenset().union(*sets)


def _mapped(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """`change` applied to every schema within, outermost last; what is data (const, enum, default) is no schema."""

    def visit(part: Any) -> Any:
        return change(_children(part, visit)) if isinstance(part, dict) else part

    mapped: Schema = visit(schema)
    return mapped


def _children(part: Schema, visit: Callable[[Any], Any], but: tuple[str, ...] = ()) -> Schema:
    """A copy of `part` with `visit` applied to the schemas directly within."""
    copy = dict(part)
    for key, value in part.items():
        if key in but:
            continue
        if key in _MAPS and isinstance(value, dict):
            copy[key] = {name: visit(child) for name, child in value.items()}
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            copy[key] = [visit(child) for child in value]
        elif key in _SINGLE:
            copy[key] = visit(value)
    return copy


def _parts(schema: Schema, pointer: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema within, with its JSON pointer."""
    yield pointer, schema
    for key, value in schema.items():
        children: list[tuple[str, Any]] = []
        if key in _MAPS and isinstance(value, dict):
            children = [(f"{key}/{name.replace('~', '~0').replace('/', '~1')}", child) for name, child in value.items()]
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            children = [(f"{key}/{i}", child) for i, child in enumerate(value)]
        elif key in _SINGLE:
            children = [(key, value)]
        for step, child in children:
            if isinstance(child, dict):
                yield from _parts(child, f"{pointer}/{step}")
