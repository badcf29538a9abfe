"""Converts protos to and from domain objects, one file per proto. No decisions are made here."""
