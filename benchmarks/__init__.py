"""Benchmarks: how fast, how large and how good, next to other libraries and to the floors.

`python -m benchmarks --help` says how to run them; `docs/benchmarks.md` has results. The
suites know their competitors only through the protocol of `benchmarks.peers`.
"""
