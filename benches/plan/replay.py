"""Replays a VM trace by the rules of `tarn plan` with --slice none, as plainly as possible: one loop over all
sockets per VM. Prints the seconds for reading and replaying, the rejected VMs, and the largest pool peak.

usage: replay.py TRACE SOCKETS CORES_PER_SOCKET MIB_PER_SOCKET POOL_SOCKETS
"""

import csv
import heapq
import sys
import time

WARM_UP_S = 3600
SAMPLE_S = 300


def main():
    path, sockets, cores_per_socket, mib_per_socket, pool_sockets = sys.argv[1], *map(int, sys.argv[2:])
    started = time.perf_counter()
    with open(path, newline="") as file:
        vms = [
            (int(row["arrive_s"]), int(row["vm_id"]), int(row["depart_s"] or 1 << 62), int(row["cores"]),
             round(float(row["mem_gb"]) * 1024))
            for row in csv.DictReader(file)
        ]
    vms.sort()
    free_cores, free_mib = [cores_per_socket] * sockets, [mib_per_socket] * sockets
    pools = sockets // pool_sockets
    used = [0] * pools
    running, rejected, peak, sample = [], 0, 0, WARM_UP_S
    for arrive, _, depart, cores, mib in vms:
        while running and running[0][0] <= arrive:
            at, socket, its_cores, its_mib = running[0]
            while sample < at:
                peak, sample = max(peak, max(used)), sample + SAMPLE_S
            heapq.heappop(running)
            free_cores[socket] += its_cores
            free_mib[socket] += its_mib
            used[socket % pools] -= its_mib
        while sample < arrive:
            peak, sample = max(peak, max(used)), sample + SAMPLE_S
        if depart <= arrive:
            continue
        best = None
        for socket in range(sockets):
            if free_cores[socket] >= cores and free_mib[socket] >= mib:
                rank = (free_cores[socket], free_mib[socket], socket)
                if best is None or rank < best:
                    best = rank
        if best is None:
            rejected += 1
            continue
        socket = best[2]
        free_cores[socket] -= cores
        free_mib[socket] -= mib
        used[socket % pools] += mib
        heapq.heappush(running, (depart, socket, cores, mib))
    while running and running[0][0] < 1 << 62:
        while sample < running[0][0]:
            peak, sample = max(peak, max(used)), sample + SAMPLE_S
        at, socket, _, its_mib = heapq.heappop(running)
        used[socket % pools] -= its_mib
    print(time.perf_counter() - started, rejected, peak)


main()
