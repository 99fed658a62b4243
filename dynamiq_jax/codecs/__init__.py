"""Codecs: how numbers become payloads."""
