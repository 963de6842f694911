"""Replacing a function and putting its own object back."""

from __future__ import annotations

import functools

import pytest

from devconv.patches import Patch


class Base:
    def speak(self):
        return "base"


class Child(Base):
    pass


def _louder(original):
    @functools.wraps(original)
    def speak(self):
        return original(self) + "!"

    return speak


def test_the_last_release_puts_the_original_s_own_object_back():
    original = vars(Base)["speak"]
    patch = Patch(Base, "speak", _louder)

    patch.hold("one")
    patch.hold("another")
    patch.release("one")
    during = Base().speak()
    patch.release("another")

    assert during == "base!"
    assert vars(Base)["speak"] is original


def test_an_inherited_attribute_is_inherited_again():
    patch = Patch(Child, "speak", _louder)

    with patch.held():
        during = Child().speak(), Base().speak()

    assert during == ("base!", "base")
    assert "speak" not in vars(Child)


def test_a_patch_on_top_of_ours_is_left_alone():
    original = vars(Base)["speak"]
    patch = Patch(Base, "speak", _louder)
    patch.hold("one")
    ours = vars(Base)["speak"]

    def theirs(self):
        return ours(self) + "?"

    Base.speak = theirs
    try:
        patch.release("one")
        assert vars(Base)["speak"] is theirs
        assert Base().speak() == "base!?"
    finally:
        Base.speak = original


def test_a_replacement_that_somebody_wraps_is_not_installed_twice():
    original = vars(Base)["speak"]
    patch = Patch(Base, "speak", _louder)
    patch.hold("one")
    ours = vars(Base)["speak"]

    @functools.wraps(ours)
    def theirs(self):
        return ours(self)

    Base.speak = theirs
    try:
        patch.release("one")
        patch.hold("one")
        assert vars(Base)["speak"] is theirs
        assert Base().speak() == "base!"
    finally:
        patch.release("one")
        Base.speak = original


def test_an_interrupt_while_a_patch_is_installed_leaves_the_original():
    original = vars(Base)["speak"]

    def interrupted(_):
        raise KeyboardInterrupt

    patch = Patch(Base, "speak", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), patch.held():
            pass

    assert vars(Base)["speak"] is original
    assert not patch.is_held


def test_a_second_holder_installs_what_the_first_was_interrupted_at():
    original = vars(Base)["speak"]
    interrupts = iter([True, False])

    def replace(function):
        if next(interrupts):
            raise KeyboardInterrupt
        return _louder(function)

    patch = Patch(Base, "speak", replace)
    with pytest.raises(KeyboardInterrupt):
        patch.hold("interrupted")
    patch.hold("second")  # before the first came to its release, as another thread can
    try:
        assert Base().speak() == "base!"
        patch.release("interrupted")
        assert Base().speak() == "base!"
    finally:
        patch.release("second")
    assert vars(Base)["speak"] is original
