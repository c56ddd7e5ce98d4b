"""Started: a server process, from its command line to its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.shard import ShardServer, log
from offbeat.worlds.processes.server.wire import TOKEN

EXIT_UNRECOVERABLE = 3  # as exit code: starting again would not help


def command(post: ShardConfig) -> list[str]:
    start = "from offbeat.worlds.processes.server.__main__ import main; main()"
    return [sys.executable, "-c", start, json.dumps(asdict(post))]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="offbeat server: %(message)s")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the one who keeps this decides
    post = ShardConfig(**json.loads(sys.argv[1]))
    client = dist.TCPStore(post.host, post.port, is_master=False, wait_for_workers=False)
    try:
        with torch.no_grad():
            ShardServer(post, dist.PrefixStore(post.prefix, client), os.environ[TOKEN].encode()).run()
    except OffbeatError as error:
        log.error("shard %d: %s", post.shard, error)
        os._exit(EXIT_UNRECOVERABLE)
    os._exit(0)  # threads of links that are still ending hold nothing that is needed
