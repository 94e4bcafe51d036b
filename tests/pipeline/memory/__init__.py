"""Tests of the passes that keep ranks below a bound of memory."""
