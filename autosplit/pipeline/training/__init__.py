"""Trains a model that is cut into stages: modules, optimizer, and step after step."""
