"""TLS 1.3 between a worker and a shard, with a certificate that the shard makes for itself.

Nobody vouches for that certificate: both ends make it part of the proof of the token (auth.py), so only the
holder of the token can be at the other end.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import socket
import ssl
import tempfile
from pathlib import Path
from threading import Lock

from offbeat.errors import LaunchError

SEND_BYTES = 128 << 10  # encrypted at once
RECEIVE_BYTES = 256 << 10


class Certificate:
    """A shard's key and certificate, in memory only and new at every start."""

    def __init__(self) -> None:
        key, self.der, password = _make_certificate()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # no session is resumed: each connection has keys of its own
        # ssl reads keys from files only. The password, without which the file is worthless, is never stored.
        with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
            file = Path(folder) / "key.pem"
            file.write_bytes(key + ssl.DER_cert_to_PEM_cert(self.der).encode())
            self.context.load_cert_chain(file, password=password)


def _make_certificate() -> tuple[bytes, bytes, bytes]:
    """Return a new private key as encrypted PEM, its certificate as DER, and the key's password."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as missing:
        raise LaunchError(
            f"connections to other hosts are encrypted, which needs the package cryptography ({missing}): "
            "pip install cryptography, or leave encryption out by OFFBEAT_INSECURE=1"
        ) from missing
    key, password = ec.generate_private_key(ec.SECP256R1()), secrets.token_hex(16).encode()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "offbeat")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # nobody checks the dates; a field must have some
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    return pem, certificate.public_bytes(serialization.Encoding.DER), password


class TlsStream:
    """Bytes over TLS on a connected socket. One thread may send while another one receives.

    OpenSSL allows no two threads in one connection at once, and Python's SSLSocket does not prevent that in
    all versions. So OpenSSL works on buffers in memory, under a lock; the threads wait for the socket without
    the lock.
    """

    def __init__(self, connection: socket.socket, certificate: Certificate | None) -> None:
        self._socket = connection
        self._lock = Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._encrypted = memoryview(bytearray(RECEIVE_BYTES))
        context = certificate.context if certificate else _worker_context()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=certificate is not None)
        self._shake_hands()
        der = certificate.der if certificate else self._tls.getpeercert(binary_form=True)
        if not der:
            raise ssl.SSLError("the shard has no certificate")
        self.certificate_digest = hashlib.sha256(der).digest()

    def send(self, data: memoryview) -> None:
        while data:
            with self._lock:
                count = self._tls.write(data[:SEND_BYTES])
                encrypted = self._outgoing.read()
            self._socket.sendall(encrypted)
            data = data[count:]

    def fill(self, buffer: memoryview) -> None:
        while buffer:
            if count := self._decrypt(buffer):
                buffer = buffer[count:]
            else:
                self._read_socket()

    def _shake_hands(self) -> None:
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            finally:  # also after an error: the alert says why
                self._socket.sendall(self._outgoing.read())
            if not done:
                self._read_socket()

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypt bytes that have arrived; return their number, 0 if a whole record has yet to arrive."""
        with self._lock:
            try:
                count: int = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # typeshed: bytes
            except ssl.SSLWantReadError:
                return 0
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        return count

    def _read_socket(self) -> None:
        count = self._socket.recv_into(self._encrypted)
        if not count:
            raise ConnectionResetError("the other end is gone")
        with self._lock:
            self._incoming.write(self._encrypted[:count])


def _worker_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proof of the token covers the certificate instead
    return context
