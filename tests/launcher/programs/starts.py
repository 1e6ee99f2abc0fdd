"""Worker 1 may begin badly: ``taken``: another program wants its port; ``hangs``."""

import json
import os
import socket
import sys
import time

import tfscale

cluster = json.loads(os.environ["TF_CONFIG"])
if cluster["task"]["index"] == 1:
    print("pid", os.getpid(), flush=True)
    if "hangs" in sys.argv:
        time.sleep(3600)
    if "taken" in sys.argv:
        port = int(cluster["cluster"]["worker"][1].rpartition(":")[2])
        squatter = socket.create_server(("127.0.0.1", port))

tfscale.ScaleStrategy(join_timeout=5)
