"""Tests of autosplit.sharded."""
