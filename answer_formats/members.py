"""Rules for the members of an object, for formats that write an object in a way of their own."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from answer_formats.rules import Rules, Wanted, literal
from answer_formats.schemas import Members, Schema, resolved

_NOT_WRITTEN: Final = (
    "anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
    "patternProperties", "propertyNames", "minProperties", "maxProperties",
)  # fmt: skip
"""Keys of a schema that say more about an object than what its members are."""
_NOT_OF_LISTS: Final = ("prefixItems", "uniqueItems", "contains", "additionalItems", "unevaluatedItems")


def members_of(tool: Wanted, schema: Schema | None = None) -> Members:
    """Return the members of an object; None: of the tool's arguments. Raises NotOffered."""
    whole = resolved(tool.schema, tool.schema if schema is None else schema)
    if not isinstance(whole, bool):
        for key in _NOT_WRITTEN:
            if key in whole and whole[key] != []:
                tool.refuse(key, "of an object is not offered in the format in which this model writes calls")
    return Members.of(tool.schema, whole)


def items_of(tool: Wanted, key: str, schema: Mapping[str, Any]) -> tuple[Schema, int, int | None]:
    """Return (the schema of the items, the least number of items, the greatest one) of a list; None for no limit.
    Raises NotOffered."""
    for name in _NOT_OF_LISTS:
        if schema.get(name):
            tool.refuse(key, f"has {name}, which is not offered in this model's format")
    most = schema.get("maxItems")
    return schema.get("items", True), int(schema.get("minItems", 0)), None if most is None else int(most)


def members_rule(
    rules: Rules, tool: Wanted, member: Callable[[str, Schema], str], separator: str, free: Callable[[Schema], str]
) -> str:
    """Add a rule for the members of the tool's arguments, in the schema's order, and return its name.

    member     returns the expression of one member
    separator  stands between two members
    free       returns the expression of a member whose key the schema does not name. Such members are written only
               if the schema names none
    """
    members = members_of(tool)
    if members.other is not None and not members.named:
        one = rules.rule(free(members.other))
        return rules.rule(f"({one} ({literal(separator)} {one})*)?")
    named = [(member(key, schema), must) for key, schema, must in members.named]
    return in_order(rules, named, separator)


def in_order(rules: Rules, named: list[tuple[str, bool]], separator: str) -> str:
    """Add a rule for expressions that come in this order, and return its name. Some of them may be left out."""
    text = literal(separator)
    # ``behind`` is the rule for the rest if something stands before it, ``first`` the one if nothing does.
    behind = first = rules.rule('""')
    for expression, must in reversed(named):
        one = rules.rule(expression)
        first, behind = (
            rules.rule(f"{one} {behind}" if must else f"{one} {behind} | {first}"),
            rules.rule(f"{text} {one} {behind}" if must else f"({text} {one})? {behind}"),
        )
    return first
