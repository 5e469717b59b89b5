"""A load generator that speaks the real wire, for the benchmarks.

`fleet` lays out the fleet, `messages` prebuilds what its agents send, `agents` are the streams, `generator` is a
process full of them, `collector` runs a real collector and measures it from outside, `certificates` are made on the
fly, `measure` watches a run.
"""
