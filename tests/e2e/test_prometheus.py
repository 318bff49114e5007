"""Debian's Prometheus scrapes the daemon: room, holders and KV cache arrive, and promtool is content."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import StartDaemon, need, wait_until

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: gpu-oom-exporter
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=5) as got:
            found = json.load(got)["data"]["result"]
        return [(row["metric"], float(row["value"][1])) for row in found]


@pytest.fixture
def prometheus(start_daemon: StartDaemon, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the demo."""
    program = shutil.which("prometheus")
    need(program, "prometheus, from Debian")
    daemon = start_daemon("--demo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(target=daemon.url.removeprefix("http://")))
    command = [str(program), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")

    def scraped() -> bool:
        try:
            return server.query("up == 1") != []
        except OSError:
            assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
            return False

    try:
        wait_until(scraped, 60.0)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=10)


def test_scrape(prometheus: Prometheus) -> None:
    """A real Prometheus has, from one scrape: room that adds up, holders that add up, and the KV cache."""
    total = "gpu_oom_vram_total_bytes - gpu_oom_vram_reserved_bytes - gpu_oom_vram_used_bytes - gpu_oom_vram_free_bytes"
    assert [value for _, value in prometheus.query(total)] == [0.0] * 4
    held = "sum by (UUID) (gpu_oom_vram_held_bytes) - on (UUID) gpu_oom_vram_used_bytes"
    assert [value for _, value in prometheus.query(held)] == [0.0] * 4
    kv = prometheus.query("gpu_oom_kv_cache_used_ratio")
    assert {labels["engine"] for labels, _ in kv} == {"chat", "code"}
    assert all(0 < value <= 1 for _, value in kv)
    joined = (
        "gpu_oom_kv_cache_used_ratio * on (engine) group_left (UUID) gpu_oom_engine_gpu_info "
        "* on (UUID) group_left (product_name) gpu_oom_gpu_info"
    )
    assert {labels["product_name"] for labels, _ in prometheus.query(joined)} == {"NVIDIA H100 80GB HBM3"}
    assert prometheus.query("sum(gpu_oom_source_up)")[0][1] == 3.0
    # in OpenMetrics a counter's family is named without _total
    family = "gpu_oom_engine_preemptions"
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/metadata?metric={family}", timeout=5) as got:
        assert json.load(got)["data"][family][0]["type"] == "counter"


def test_promtool(start_daemon: StartDaemon) -> None:
    """The served page passes `promtool check metrics`."""
    promtool = shutil.which("promtool")
    need(promtool, "promtool, from Debian")
    page = start_daemon("--demo").get()[1]
    done = subprocess.run([str(promtool), "check", "metrics"], input=page, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
