"""A process that collects addresses: its arguments are a dictionary of those of ``collect``.

Prints FOUND with the list, REFUSED with what was wrong, and what it was told meanwhile as it comes.
"""

import json
import sys

from tfscale.cluster import collect, gathering

gathering.FIRST_LOG, gathering.BETWEEN_LOGS = 0.5, 0.5
collect._BETWEEN_NEWS = 0.1
arguments = json.loads(sys.argv[1])
print("BEGINS", flush=True)
try:
    addresses = collect.collect(**arguments, say=lambda line: print(line, flush=True))
except gathering.JoinError as error:
    print(f"REFUSED {error}", flush=True)
else:
    print(f"FOUND {json.dumps(addresses)}", flush=True)
