"""What probe results say: is this GPU, link or node slower or wronger than it should be? Pure: no I/O, no clock.

`judgement.judge` takes the newest results of a fleet; `drift.drift` one GPU's own history; `groups_of_nodes.blame`
collectives over several nodes. docs/explanation/probe-judgement.md says how, and how well.
"""
