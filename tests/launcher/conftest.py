"""Hosts: network namespaces of this machine, with a real sshd in each."""

import contextlib
import os
import shutil
import subprocess

import pytest

from tfscale.tools.bench.link import LinkError, Network, check

PORT = 2222


class Hosts:
    """Three of them: the launcher's, and two others.

    Attributes:
        names: their addresses.
        prefix: what runs a command on the first.
        ssh: the words for ``--ssh`` with which the first reaches the others.
    """

    def __init__(self, network, folder):
        self.names = network.hosts
        self.prefix, *self.others = network.prefixes
        self.folder = folder
        self.known = folder / "known_hosts"
        self.ssh = (
            f"ssh -p {PORT} -i {folder / 'key'} -o UserKnownHostsFile={self.known} -F none "
            "-o StrictHostKeyChecking=yes"
        )

    def run(self, host, *words):
        subprocess.run([*[self.prefix, *self.others][host], *words], check=True)


def key(path):
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True)
    return path.with_suffix(".pub").read_text() if path.suffix else None


@contextlib.contextmanager
def sshd(prefix, folder):
    options = {
        "Port": PORT, "HostKey": folder / "host", "AuthorizedKeysFile": folder / "key.pub",
        "PidFile": "none", "StrictModes": "no", "UsePAM": "no", "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no", "MaxStartups": 100,
    }  # fmt: skip
    config = folder / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    command = [*prefix, shutil.which("sshd", path="/usr/sbin"), "-D", "-e", "-f", str(config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    try:
        check()
    except LinkError as error:
        pytest.skip(str(error))
    if not shutil.which("sshd", path="/usr/sbin") or not shutil.which("ssh"):
        pytest.skip("no sshd: apt-get install openssh-server")
    os.makedirs("/run/sshd", exist_ok=True)  # which sshd wants
    folder = tmp_path_factory.mktemp("ssh")
    key(folder / "key")
    key(folder / "host")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(3, "1gbit"))
        found = Hosts(network, folder)
        public = (folder / "host.pub").read_text()
        found.known.write_text("".join(f"[{name}]:{PORT} {public}" for name in found.names))
        for prefix in found.others:
            stack.enter_context(sshd(prefix, folder))
        for name in found.names[1:]:
            wait_for(found, name)
        yield found


def wait_for(hosts, name):
    """Wait until a host's sshd listens."""
    for _ in range(100):
        words = [*hosts.prefix, *hosts.ssh.split(), name, "true"]
        if subprocess.run(words, check=False, capture_output=True).returncode == 0:
            return
    raise AssertionError(f"no sshd on {name}")
