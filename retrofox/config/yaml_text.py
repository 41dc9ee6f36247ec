"""YAML as recipes use it: 6e-4 is a number, a key given twice is an error, "<<" merges, "a.b=c" sets one value."""

from __future__ import annotations

import copy
import re
from typing import Any

import yaml


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one "a.b=c" in nested dicts and lists, creating missing sections; ValueError for another form or place."""
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ValueError(f"override must look like a.b=c, got {override!r}")
    value = read_yaml(text, f"override {override!r}")
    node: Any = values
    for depth, key in enumerate(keys):
        index: Any = int(key) if isinstance(node, list) and key.isdecimal() else key
        last = depth == len(keys) - 1
        try:
            if not last and isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            # a copy: an alias elsewhere keeps the old value
            node[index] = value if last else copy.copy(node[index])
            node = node[index]
        except (TypeError, IndexError):
            here = ".".join(keys[:depth]) or "the recipe"
            what = f"a list of {len(node)}, counted from 0" if isinstance(node, list) else repr(node)
            raise ValueError(f"override {override!r}: {here} is {what}, which has no {key!r}") from None


class _Loader(yaml.SafeLoader):
    """YAML with 6e-4 read as a number (YAML 1.1 reads a string) and repeated keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: *other
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """YAML that `_Loader` reads as it was written: a text such as "6e-4" gets quotes."""


for side in (_Loader, _Dumper):
    side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+0123456789."),
    )


def write_yaml(values: Any) -> str:
    """YAML of plain values, in their order, on one line where nothing is nested; `read_yaml` gives them back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def read_yaml(text: str, origin: str) -> Any:
    """Parses YAML; raises ValueError naming `origin` and the line."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # numbers of thousands of digits, as many brackets
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        why = getattr(error, "problem", None) or getattr(error, "context", None) or " ".join(str(error).split())
        raise ValueError(f"{origin}: not valid YAML: {where}{why}") from None
