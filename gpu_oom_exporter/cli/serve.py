"""`serve`: run the daemon until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import threading

from gpu_oom_exporter import __version__
from gpu_oom_exporter.cli import OK, Misuse, load_config, logs, paths
from gpu_oom_exporter.daemon import Daemon, simulated_host, this_host
from gpu_oom_exporter.publish.web import ListenError, Server, split_address

log = logging.getLogger(__name__)

LISTEN = "127.0.0.1:10140"

DESCRIPTORS = 1024
"""Enough for every connection, engine and pipe."""

YOUNG_OBJECTS = 20_000
"""Objects made between two young collections. A tick makes a few thousand and frees them without the collector."""

LAST_RESORT_SECONDS = 1.8
"""After this a stop is forced: a name server that does not answer must not hold the next start."""


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked, then serve."""
    chosen = vars(arguments)
    config = load_config(chosen["config.file"])
    addresses = tuple(chosen["web.listen_address"] or (LISTEN,))
    try:
        for address in addresses:
            split_address(address)
    except ListenError as err:
        raise Misuse(str(err)) from err
    path = chosen["web.telemetry_path"]
    if not path.startswith("/") or path.startswith("/-/") or any(c in path for c in "{}?# "):
        raise Misuse(f"--web.telemetry-path: {path!r} must begin with / and hold none of {{ }} ? #")
    if not 0.1 <= chosen["demo.speed"] <= 100:
        raise Misuse(f"--demo.speed: {chosen['demo.speed']:g} is not between 0.1 and 100")
    if chosen["config.check"]:
        print(f"{chosen['config.file'] or 'the defaults'}: valid, {len(config.engines)} engines")
        return OK
    logs.set_up(chosen["log.level"], chosen["log.format"])
    if arguments.demo:
        world, config = simulated_host(chosen["demo.speed"])
    else:
        world = this_host(config, paths(arguments), watch=True)
    if chosen["collect.process_pid"]:
        config = config.model_copy(update={"processes": config.processes.model_copy(update={"show_pid": True})})
    log.info(
        "starting",
        extra={
            "version": __version__,
            "demo": arguments.demo or None,
            "config": chosen["config.file"],
            "sources": ",".join(sorted({source.name for source in world.sources})),
            "engines": ",".join(engine.name for engine in config.engines),
        },
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < DESCRIPTORS and (hard == resource.RLIM_INFINITY or soft < hard):
        enough = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    gc.freeze()  # the modules live as long as we do: the collector need not walk them every minute
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        asyncio.run(_serve(Daemon(world, config), addresses, path))
    except ListenError as err:
        raise Misuse(str(err)) from err
    log.info("stopped")
    return OK


SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


async def _serve(daemon: Daemon, addresses: tuple[str, ...], path: str) -> None:
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    asked = threading.Event()

    def watch() -> None:
        # in a thread of its own, which nothing blocks
        while True:
            number = signal.sigwait(SIGNALS)
            if number == signal.SIGUSR1:
                daemon.release_nvml()
            elif not asked.is_set():
                asked.set()
                last_resort = threading.Timer(LAST_RESORT_SECONDS, os._exit, (OK,))
                last_resort.daemon = True
                last_resort.start()
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(main.cancel)

    def started(server: Server) -> None:
        for host, port in server.bound:
            name = f"[{host}]" if ":" in host else host
            log.info("listening", extra={"url": f"http://{name}:{port}{path}"})

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        await daemon.run(addresses, path, started)
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
