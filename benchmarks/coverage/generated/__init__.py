"""Modules that hypothesis makes up: random graphs of layers, sharing, views, writes, dropout."""
