"""A process that meets others: its arguments are the addresses, its place, and seconds.

Prints MET with the time, REFUSED with what was wrong, and what it was told meanwhile as it comes.
"""

import json
import sys
import time

from tfscale.cluster import connections, gathering, meeting

addresses, me, timeout = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
gathering.FIRST_LOG, gathering.BETWEEN_LOGS = 0.5, 0.5
connections.CONNECT = connections.ANSWER = 0.7
workers = [meeting.Worker(f"worker {i}", address) for i, address in enumerate(addresses)]
print("BEGINS", flush=True)
began = time.monotonic()
try:
    meeting.meet(workers, me, timeout, say=lambda line: print(line, flush=True))
except meeting.JoinError as error:
    print(f"REFUSED {error}", flush=True)
else:
    print(f"MET after {time.monotonic() - began:.3f} s", flush=True)
