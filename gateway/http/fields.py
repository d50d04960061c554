"""Read fields of a request that must have one type. Pure."""

from typing import Any

from gateway.http.errors import ApiError


def string_in(place: str, given: dict[str, Any], name: str) -> str:
    """Return a text of an object. ``place``: where the object stands. Raises ApiError for another type."""
    value = given.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{name} must be a string", param=f"{place}.{name}")
    return value


def object_in(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a request's body; an empty one for none. Raises ApiError for another type."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object", param=name)
    return value or {}
