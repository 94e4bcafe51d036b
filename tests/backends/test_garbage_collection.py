"""What the garbage collector looks at while graphs are made."""

from __future__ import annotations

import gc

from autosplit.backends.backend import collecting_new_objects_only


def test_old_objects_are_left_alone_and_given_back() -> None:
    with collecting_new_objects_only():
        assert gc.get_freeze_count() > 1000  # a few die now and then
        with collecting_new_objects_only():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with collecting_new_objects_only():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
