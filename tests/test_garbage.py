"""What the garbage collector looks at while graphs are made."""

from __future__ import annotations

import gc

from autosplit.garbage import only_new_garbage


def test_old_objects_are_left_alone_and_given_back() -> None:
    with only_new_garbage():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        with only_new_garbage():
            assert gc.get_freeze_count() == frozen
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with only_new_garbage():
            assert gc.get_freeze_count() == frozen
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
