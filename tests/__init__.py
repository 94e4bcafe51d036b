"""Processes that tests start import this before they run anything of a test."""

import os

if os.environ.get("AUTOSPLIT_TEST_DEVICE", "cpu") != "cpu":
    from tests import devices

    devices.use(devices.chosen())

if os.environ.get("AUTOSPLIT_TEST_COMM", "gloo") != "gloo":
    from tests.strict_group.group import use

    use()
