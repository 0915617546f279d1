"""Two hosts with a long cable between them: run in a network namespace of its own.

``python cable.py DELAY PROGRAM ARGUMENTS…`` runs the program with ``FAR`` in its environment: what to
put before a command so that it runs on the other host. This host is 10.94.0.1, the other 10.94.0.2. Each
packet takes DELAY seconds.
"""

import collections
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000


def tun(name: str) -> int:
    """A network device whose packets this process reads and writes."""
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR)
    except OSError as error:
        sys.exit(f"{error}: this test needs the kernel's TUN devices\n  fix: modprobe tun, as root")
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | WITHOUT_HEADER))
    return fd


def use(name: str, address: str) -> None:
    for words in (f"addr add {address}/24 dev {name}", f"link set {name} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)


def carry(source: int, into: int, delay: float) -> None:
    """Passes packets on, each so much later."""
    packets: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        left = None if not packets else max(packets[0][0] - time.monotonic(), 0)
        if select.select([source], [], [], left)[0]:
            packets.append((time.monotonic() + delay, os.read(source, 1 << 16)))
        while packets and packets[0][0] <= time.monotonic():
            os.write(into, packets.popleft()[1])


def main() -> int:
    if sys.argv[1] == "far":
        # The other host's end goes to the process that carries.
        fd = tun("far")
        use("far", "10.94.0.2")
        with socket.socket(fileno=0) as pipe:
            socket.send_fds(pipe, [b"f"], [fd])
        return 0
    delay, program = float(sys.argv[1]), sys.argv[2:]
    # The other host: it ends with its standard input.
    pipe = subprocess.PIPE
    far = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; read _"], stdin=pipe, stdout=pipe)
    assert far.stdout is not None
    far.stdout.readline()
    inside = ["nsenter", "-t", str(far.pid), "-n"]
    ours, theirs = socket.socketpair()
    subprocess.run([*inside, sys.executable, __file__, "far"], stdin=theirs, check=True)
    (other,) = socket.recv_fds(ours, 1, 1)[1]
    own = tun("near")
    use("near", "10.94.0.1")
    for source, into in ((own, other), (other, own)):
        threading.Thread(target=carry, args=(source, into, delay), daemon=True).start()
    return subprocess.run(program, env=os.environ | {"FAR": " ".join(inside)}).returncode


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Its threads carry for ever.
    os._exit(code)
