"""What the benchmarks of the console share: a collector whose fleet is made inside, a browser that is watched,
and the live fleet with faults on which tasks are walked and pictures are taken."""
