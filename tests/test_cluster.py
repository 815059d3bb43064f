"""Jobs on a local Ray cluster: the same table as from one process, whoever dies on the way."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from spiritlevel.errors import InputError
from spiritlevel.papers.cluster import run_jobs
from spiritlevel.papers.studies import combine, execute, find


def timeless(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the time, and without the SVG files, whose inner names count the charts that a process has drawn."""
    files = [{k: v for k, v in summary["files"].items() if not k.endswith(".svg")} for summary in summaries]
    return [{**summary, "seconds": None, "files": kept} for summary, kept in zip(summaries, files, strict=True)]


def test_a_wrong_address_is_one_sentence() -> None:
    pytest.importorskip("ray", reason="needs the extra `cluster`; `make test-full` installs it")
    with pytest.raises(InputError, match=r"--cluster takes ray, or the address of a running cluster"):
        run_jobs("confidence", [], "out", address="dask")


def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--cluster needs ray, .* pip install 'spiritlevel\[cluster\]'"):
        run_jobs("confidence", [], "out")


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_jobs_on_a_cluster_give_the_table_of_one_process(tmp_path: Path) -> None:
    study = find("confidence")
    configs = study.jobs("smoke", divisions=[6, 9, 12])
    found = run_jobs("confidence", configs, tmp_path / "cluster")
    alone = [execute(study, config, tmp_path / "alone") for config in configs]
    assert timeless(found) == timeless(alone)
    assert combine(found, study.statements) == combine(alone, study.statements)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_running_cluster_is_joined_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of our own on this machine, with a token of our own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    port, client_port = free_ports(2)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus", "1"]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard=false", "--port", str(port)]
    command += ["--ray-client-server-port", str(client_port), "--min-worker-port", "0", "--max-worker-port", "0"]
    command += ["--temp-dir", f"/tmp/sl{port}"]  # short, for its sockets; and so that no other program finds it
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        command = [sys.executable, "-m", "spiritlevel", "reproduce", "confidence", "--scale", "smoke"]
        command += ["--divisions", "6,9", "--cluster", f"ray://127.0.0.1:{client_port}"]
        command += ["--json", str(tmp_path / "found.json")]
        deadline = time.monotonic() + 120  # for the head to answer, on a busy machine
        while not listens(client_port) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(4)  # it listens before it can serve
        while True:
            found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
            if found.returncode == 0 or "no cluster could be had" not in found.stderr or time.monotonic() > deadline:
                break
        assert found.returncode == 0, found.stderr
    finally:
        head.terminate()
        head.wait(timeout=60)
        shutil.rmtree(f"/tmp/sl{port}", ignore_errors=True)
    study = find("confidence")
    alone = [execute(study, config, tmp_path / "alone") for config in study.jobs("smoke", divisions=[6, 9])]
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == json.loads(
        json.dumps(combine(alone, study.statements))
    )


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def workers(place: Path, task: bytes = b"ray::_job") -> list[int]:
    """Ray's processes that run a task for `place` at this moment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and task in (folder / "cmdline").read_bytes():
                found += [int(folder.name)] if bytes(place) in (folder / "environ").read_bytes() else []
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers in /proc")
def test_killed_workers_and_a_killed_driver_change_nothing(tmp_path: Path) -> None:
    """Each job trains two networks: workers die when one is done, then the driver with all that it has started."""

    def start(name: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spiritlevel", "reproduce", "radial", "--scale", "smoke", "--steps", "60,80"]
        where = ["--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json")]
        environment = {**os.environ, "SPIRITLEVEL_CACHE": str(tmp_path / f"{name} cache"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, *where, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def trained() -> dict[Path, int]:
        """The finished networks, and when they were finished."""
        states = (tmp_path / "many cache" / "networks").glob("*/state.json")
        return {path: path.stat().st_mtime_ns for path in states if json.loads(path.read_text())["finished"]}

    def wait_until(holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 200
        while not holds():
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    driver = start("many", "--cluster", "ray")
    wait_until(lambda: trained() and workers(tmp_path))
    finished, killed = trained(), workers(tmp_path)
    for process in killed:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: set(workers(tmp_path)) - set(killed))  # the jobs have new workers
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert not list((tmp_path / "many").rglob("summary.json")), "no job had ended by itself"

    for again in (start("many", "--cluster", "ray"), start("one")):
        said = again.communicate(timeout=200)[0]
        assert again.returncode == 0, said
        assert "2 jobs" in said
    assert finished.items() <= trained().items(), "what was trained before the kills was not trained again"
    many, one = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("many", "one"))
    assert many["rows"] == one["rows"]


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's own files, when its nodes end
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers in /proc")
def test_the_networks_of_a_league_go_to_two_nodes_and_a_killed_worker_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes on this machine; the worker that trains a network dies, and another one trains that network."""
    from ray.cluster_utils import Cluster

    study = find("generalisation")
    config = study.at("smoke")
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / "cache"))
    (port,) = free_ports(1)
    head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1)
    killed: list[int] = []

    def kill(what: str, done: int, total: int) -> None:
        assert total == len(study.pieces(config)) + 1, "one task for each network, and the job"
        for process in workers(tmp_path, b"ray::_piece")[:1] if not killed else []:
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    try:
        found = run_jobs(study.name, [config], tmp_path / "cluster", address=f"ray://127.0.0.1:{port}", progress=kill)
    finally:
        nodes.shutdown()
    assert killed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        alone = execute(study, config, tmp_path / "alone", cache=tmp_path / "networks")
    finally:
        torch.set_num_threads(threads)
    rows = [
        pl.read_parquet(study.folder(config, tmp_path / where) / "values.parquet").drop("seconds", strict=False)
        for where in ("cluster", "alone")
    ]
    assert rows[0].equals(rows[1])
    assert [ruling["ours"] for ruling in found[0]["rulings"]] == [ruling["ours"] for ruling in alone["rulings"]]
