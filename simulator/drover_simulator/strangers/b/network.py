"""Two-level fat tree: rings of jobs over leaves and spines by ECMP, rates by max-min fair sharing (Bertsekas and Gallager)."""

import numpy as np

from drover_simulator.strangers.b.fleet import Fleet, Job

DUTY = 0.5  # share of its port that a ring asks for on the average of an exchange


def solve(f: Fleet, jobs: list[Job], faults: list[tuple[str, int, float]], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of its nominal rate that each GPU's exchange gets, and the queueing at each port (0 to 1)."""
    eff, queue = np.ones(f.G), np.zeros(f.NP)
    src_l, dst_l = [], []
    for j in jobs:
        if not j.waits:
            continue
        where = f.node[j.gpus]
        if int(j.gpus.sum()) % 5 < 3:  # a scheduler that does not know the leaves: neighbours of the ring lie anywhere
            where = (where * 7919 + 13) % 1009
        g = j.gpus[np.lexsort((where, f.slot[j.gpus]))]
        s = f.slot[g]
        same = np.append(s[1:] == s[:-1], False)
        first = np.maximum.accumulate(np.where(np.append(True, s[1:] != s[:-1]), np.arange(len(g)), 0))
        nxt = np.where(same, np.append(g[1:], g[0]), g[first])
        ok = f.node[nxt] != f.node[g]
        src_l.append(g[ok])
        dst_l.append(nxt[ok])
    if not src_l or not sum(map(len, src_l)):
        return eff, queue
    src, dst = np.concatenate(src_l), np.concatenate(dst_l)
    ps, pd = f.gport[src], f.gport[dst]
    per_port = np.bincount(f.gport, minlength=f.NP)
    want = DUTY * np.minimum(f.port_bw[ps] / per_port[ps], f.port_bw[pd] / per_port[pd])
    leaves, up = len(f.leaf_names), f.uplinks
    alive = np.full(leaves, up)
    cap_port = f.port_bw.copy()
    bad: dict[int, float] = {}
    for what, i, k in faults:
        if what == "port":
            cap_port[i] *= k * DUTY
            bad[i] = k
        else:
            alive[i] = max(1, round(up * k))
    ls, ld = f.port_leaf[ps], f.port_leaf[pd]
    mix = (src * 2654435761 + dst * 40503 + seed * 97) % 1000003
    u = mix % np.minimum(alive[ls], alive[ld])
    cross = ls != ld
    leaf_bw = np.bincount(f.port_leaf, weights=f.port_bw, minlength=leaves) / f.oversub / up
    cap = np.concatenate([cap_port, cap_port, np.repeat(leaf_bw, up), np.repeat(leaf_bw, up), [1e18]])
    none = len(cap) - 1
    routes = np.stack(
        [
            ps,
            f.NP + pd,
            np.where(cross, 2 * f.NP + ls * up + u, none),
            np.where(cross, 2 * f.NP + leaves * up + ld * up + u, none),
        ]
    )
    rate, fixed, left = np.zeros(len(src)), np.zeros(len(src), bool), cap.copy()
    for _ in range(60):
        if fixed.all():
            break
        n = np.bincount(routes[:, ~fixed].ravel(), minlength=len(cap))
        share = np.where(n > 0, left / np.maximum(n, 1), 1e18)
        limit = np.minimum(share[routes].min(axis=0), want)
        low = limit[~fixed].min() * 1.0001
        now = ~fixed & (limit <= low)
        rate[now] = limit[now]
        fixed |= now
        for r in routes:
            left -= np.bincount(r[now], weights=rate[now], minlength=len(cap))
        left = np.maximum(left, 1.0)
    share = np.minimum(1.0, rate / want)
    for i, k in bad.items():  # a congestion tree: who shares an uplink with the blocked flows waits too
        hit = (ps == i) | (pd == i)
        spread = np.isin(routes[2], routes[2][hit & cross]) & cross & ~hit
        share[spread] *= 1 - 0.3 * (1 - k)
        queue[ps[hit]] = np.maximum(queue[ps[hit]], 1 - k)
        queue[ps[spread]] = np.maximum(queue[ps[spread]], 0.3 * (1 - k))
    np.minimum.at(eff, src, share)
    np.minimum.at(eff, dst, share)
    np.maximum.at(queue, ps, 1 - share)
    return eff, queue
