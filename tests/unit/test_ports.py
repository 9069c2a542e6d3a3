"""Ports for a rendezvous."""

import socket
from pathlib import Path

from slime_cua.core.ports import free_port


def test_a_port_is_free_and_no_client_can_be_given_it():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert 1024 < port < lowest
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_client_can_be_connected_to_itself_inside_the_clients_range():
    """The fault that the choice avoids, made by hand."""
    with socket.socket() as client:
        client.bind(("127.0.0.1", 0))
        client.connect(client.getsockname())
        assert client.getpeername() == client.getsockname()
