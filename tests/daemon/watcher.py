"""A watch over the logs in a folder, as a process of its own that can be killed: FOLDER ARCHIVE."""

from __future__ import annotations

import sys
import threading

from gpu_oom_exporter.daemon import SystemClock
from gpu_oom_exporter.daemon.watching import Watch
from gpu_oom_exporter.publish.archive import Archive
from gpu_oom_exporter.sources.logs import LogFiles

if __name__ == "__main__":
    folder, archive = sys.argv[1:]
    Watch(LogFiles({f"{folder}/*.log": ""}), None, Archive(archive), SystemClock()).run(threading.Event())
