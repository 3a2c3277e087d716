"""Registries of components: names, built-in ones, plugins."""

from dataclasses import dataclass

import pytest

from dbo import components
from dbo.components import Registry, as_dataclass, check_fields


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    monkeypatch.setattr(components, "_registries", [])
    return Registry("shape", {"known": "a.module"}, methods=("area",))


def test_a_class_becomes_a_frozen_dataclass_of_its_parameters(registry: Registry[type]) -> None:
    """An author writes typed attributes; the decorator does the rest."""

    @registry.register("square")
    class Square:
        """A square."""

        side: float = 2.0

        def area(self) -> float:
            return self.side**2

    assert registry["square"](side=3.0).area() == 9.0
    with pytest.raises(AttributeError):
        Square().side = 1.0     # type: ignore[misc]
    assert registry.find_name(Square) == "square"
    assert list(registry) == ["known", "square"]


def test_a_missing_method_is_named(registry: Registry[type]) -> None:
    with pytest.raises(ValueError, match="shape 'flat': Flat needs a method area"):
        @registry.register("flat")
        class Flat:
            """Flat."""


def test_a_class_without_docstring_is_refused(registry: Registry[type]) -> None:
    """`dbo list` shows the first line of it."""
    with pytest.raises(ValueError, match="needs a docstring"):
        @registry.register("silent")
        class Silent:
            def area(self) -> float:
                return 0.0


@pytest.mark.parametrize("name", ["Upper", "1st", "a-b", "", "a" * 65, 3])
def test_malformed_names_are_refused(registry: Registry[type], name: str) -> None:
    with pytest.raises(ValueError, match="the name is not allowed"):
        registry.add(name, object, "mine")


def test_the_name_of_a_built_in_one_is_refused(registry: Registry[type]) -> None:
    """Also before the built-in one has been imported."""
    with pytest.raises(ValueError, match="'known' is the name of a built-in one"):
        registry.add("known", object, "mine")


def test_two_modules_cannot_share_a_name(registry: Registry[type]) -> None:
    registry.add("one", int, "mine", "int")
    registry.add("one", int, "mine", "int")         # a notebook's cell, executed twice
    with pytest.raises(ValueError, match="registered twice"):
        registry.add("one", int, "other", "int")


def test_forget_removes_what_a_module_has_registered(registry: Registry[type]) -> None:
    registry.add("one", int, "mine", "int")
    registry.add("two", str, "other", "str")
    components.forget("mine")
    assert list(registry) == ["known", "two"]
    assert components.find_owned("other") == [(registry, "two")]


def test_an_attribute_without_a_type_is_reported() -> None:
    """`side = 2` would silently not be a parameter."""

    class Square:
        side = 2

    assert "side has no type" in str(check_fields("shape", as_dataclass(Square)))


def test_an_attribute_that_a_base_declares_needs_no_type() -> None:
    @dataclass(frozen=True)
    class Base:
        side: float = 1.0

    class Square(Base):
        side = 2.0

    assert check_fields("shape", as_dataclass(Square)) is None
