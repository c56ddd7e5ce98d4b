"""Process of a host's shards: `python -m offbeat.worlds.processes.server CONFIG`, with a ShardConfig as JSON.

`spare` instead of CONFIG: the process waits until its config is written to it, or ends with its supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from threading import Thread

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
    """Serve the shards that the command line describes, until no worker is left."""
    logging.basicConfig(level=logging.WARNING, format="offbeat server: %(message)s")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the supervisor decides
    text = sys.stdin.readline() if sys.argv[1] == SPARE else sys.argv[1]
    if not text:  # the supervisor has ended
        os._exit(0)
    first, *others = ShardConfig(**json.loads(text)).of_process()
    threads = [Thread(target=serve, args=(config,)) for config in others]
    for thread in threads:
        thread.start()
    serve(first, publish=True)
    for thread in threads:
        thread.join()
    os._exit(0)  # without waiting for the threads of connections: they have nothing left to save


def serve(config: ShardConfig, publish: bool = False) -> None:
    """Serve one shard; an error ends the process. `publish`: tell that this process has the shard."""
    try:
        client = dist.TCPStore(config.host, config.tcp_port, is_master=False, wait_for_workers=False)
        with torch.no_grad():
            store = DeadlineStore(dist.PrefixStore(config.prefix, client), config.timeout_s)
            token = os.environ[TOKEN].encode()
            if publish:
                publish_process(store, token, config.shard)
            ShardServer(config, store, token).run()
    except OffbeatError as error:
        log.error("shard %d: %s", config.shard, error)
        os._exit(EXIT_UNRECOVERABLE)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the supervisor starts all shards again


if __name__ == "__main__":
    main()
