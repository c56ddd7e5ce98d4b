"""Process of one shard: `python -m offbeat.worlds.processes.server CONFIG`, with a ShardConfig as JSON.

`spare` instead of CONFIG: the process waits until its config is written to it, or ends with its supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.shard import ShardServer, log
from offbeat.worlds.processes.server.standby import publish_process
from offbeat.worlds.processes.server.supervisor import EXIT_UNRECOVERABLE, SPARE
from offbeat.worlds.processes.store import DeadlineStore


def main() -> None:
    """Serve the shard that the command line describes, until no worker is left."""
    logging.basicConfig(level=logging.WARNING, format="offbeat server: %(message)s")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the supervisor decides
    text = sys.stdin.readline() if sys.argv[1] == SPARE else sys.argv[1]
    if not text:  # the supervisor has ended
        os._exit(0)
    config = ShardConfig(**json.loads(text))
    client = dist.TCPStore(config.host, config.tcp_port, is_master=False, wait_for_workers=False)
    try:
        with torch.no_grad():
            store = DeadlineStore(dist.PrefixStore(config.prefix, client), config.timeout_s)
            token = os.environ[TOKEN].encode()
            publish_process(store, token, config.shard)
            ShardServer(config, store, token).run()
    except OffbeatError as error:
        log.error("shard %d: %s", config.shard, error)
        os._exit(EXIT_UNRECOVERABLE)
    os._exit(0)  # without waiting for the threads of connections: they have nothing left to save


if __name__ == "__main__":
    main()
