"""ShardCopy: a copy of another shard's state, in the process of the next shard, its second.

The copy survives the shard, not the second: a shard whose second has died sends its state anew when the
second is back. A shard that was started again asks for the copy by its identity.
"""

from __future__ import annotations

from threading import Lock

from offbeat.server.follower import Follower
from offbeat.server.messages import Tensors
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.copy_wire import receive_effect, receive_state, send_state
from offbeat.worlds.processes.server.wire import (
    FROM_SHARDS,
    MessageType,
    ProtocolError,
    encode_header,
    read_header,
)

NONE = 0  # as the identity of a copy: there is none


class ShardCopy:
    """The copy of one other shard, and the connections that change it and ask for it."""

    def __init__(self, second: ShardConfig, report_size: int) -> None:
        self._config = second.of_followed() if second.follows is not None else None
        self._report_size = second.report_size + report_size
        self._follower: Follower | None = None
        self._identity = NONE
        self._source: Connection | None = None  # of the effects
        self._lock = Lock()

    @property
    def is_there(self) -> bool:
        """True if a whole state has been received."""
        return self._follower is not None

    def serve(self, kind: MessageType, identity: int, count: int, connection: Connection) -> None:
        """Serve a shard's connection, after its first header, until it ends."""
        if self._config is None:
            raise ProtocolError(f"{kind.name}, but this shard keeps no copies")
        if kind is MessageType.RECOVER:
            self._give_back(identity, connection)
            return
        state = receive_state(connection, count, self._config)
        with self._lock:
            self._end_source()
            self._follower = Follower(state, self._config.make_apply())
            self._identity, self._source = identity, connection
        connection.send(encode_header(MessageType.EFFECT_ACK, 0))
        self._follow(connection, self._config.buffers())

    def _follow(self, connection: Connection, buffers: Tensors) -> None:
        while True:
            kind, first, count, number = read_header(connection, FROM_SHARDS)
            if kind is not MessageType.EFFECT:
                raise ProtocolError(f"{kind.name} among effects")
            effect = receive_effect(connection, first, count, buffers, self._report_size)
            with self._lock:
                if self._source is not connection or self._follower is None:
                    return  # the shard has been started again, and has its state back
                self._follower.follow(effect)
            connection.send(encode_header(MessageType.EFFECT_ACK, number))

    def _give_back(self, identity: int, connection: Connection) -> None:
        with self._lock:
            self._end_source()
            found = self._follower is not None and identity == self._identity != NONE
            state = self._follower.settle() if self._follower is not None and found else None
        if state is None:
            connection.send(encode_header(MessageType.COPY, NONE))
        else:
            send_state(connection, identity, state)

    def _end_source(self) -> None:
        if self._source is not None:
            self._source.end()
            self._source = None
