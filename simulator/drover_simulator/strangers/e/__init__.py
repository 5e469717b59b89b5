"""Generator E of GPU fleets' telemetry: a specialist of heat, of idle jobs and of clocks.

Written by a stranger from a brief, with no sight of a detector, of a test or of another generator.

Requirements that it works from
    `write_case(folder, seed, *, nodes, hours, interval_s, healthy)` writes one case; the same arguments give the
    same bytes; `faults=0` is `healthy=True` (all hard negatives, no fault). Most cases: 3 to 6 hours, 30 to 200
    GPUs (at 1 and 2 s at most 64), each 1 to 60 s. Three quarters of the faults: thermal `cooling` (R +10 to 60 %,
    sudden, over ten minutes, over hours; in training, inference, bursts, jobs that come and go), `fan` (stops,
    slower, a bank, a wall at its limit; nodes with rpm columns and without), `rack` (CRAC, door, containment, CDU
    pump; inlet measured or not), `hbm` (one stack's pad; with the driver's limit in the inventory or without),
    `idle/held` (five ways), `liveness/clock_wrong` (step, drift, back again), straggler `thermal`. A quarter:
    stragglers (clock, power cap, host, unexplained), a stopped rank, memory, links, XIDs, silence, lost GPUs, hung
    drivers, a rack's power, drift.
    Rows bear the collector's time: a wrong clock shows in `clock_offset_s` and in the event `clock_wrong` only.
    A fault that cannot be seen gets no label: the case is run without and with its faults on the same noise; a
    fault whose effect is under a bound (2 C of a GPU, 7 % of rpm, 3 % of a job's pace...) is taken out and others
    are tried.
    A slow ramp's label starts at a third of its size; over 20 minutes long it has a precursor `heat` from its
    onset.

Physics (all from memory of textbooks and data sheets, no source was looked up)
    Power: idle + leakage, exponential in die temperature (e-fold in 30 to 55 K) + HBM + C f V^2 with V linear in f.
    Clock: in steps of 15 MHz, the least of the set limit, what the power cap leaves, and a ceiling that an
    integrator lowers above the slowdown temperature (die or HBM) and raises below it; above the hardware limit at
    most half.
    Heat: die (2 to 8 s) over sink or cold plate (8 to 130 s) over local air; local air = supply of the room or loop
    (day curve, CRAC saw-tooth of 1 to 3 C each 10 to 20 min, wander) + recirculation of own and neighbour racks
    (lag 90 to 420 s) + host's heat + boards in front in the airflow. Sink R goes with flow^-0.6 to -0.85 (air) or
    -0.45 (water), and with altitude. HBM: between die and sink, plus its own power times R.
    Fans: a wall of 6 to 12 for a node, felt by slots near them; PI on the hottest board, steps, or fixed speed.
    Spread: R by 10 to 20 % from best to worst unit, C 3.5 %, leakage 20 %, sensors off by up to +-3 C; whole
    degrees.
    Jobs: synchronous ones wait for the slowest rank (waiting costs 0.3 of a computing rank's power), pipelines,
    uneven experts, services at 20 to 40 % of the limit, bursts, comings and goings, notebooks, nights idle at P8.

Not in it: mig.parquet (boards in MIG mode lack their utilisation columns), workload.parquet, NVLink columns, host
sensors apart from inlet and fans, congestion of switches.
"""

from drover_simulator.strangers.e.case import write_case

__all__ = ["write_case"]
