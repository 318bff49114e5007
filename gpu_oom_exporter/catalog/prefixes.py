"""What stands before a message: prefixes of engines, loggers, journald's layouts and log viewers.

Named groups: ``name``, ``pid``, ``rank``, ``ranks`` of an engine; ``node`` in Ray; ``ncclpid`` of NCCL; ``stream`` (container, pod or service); ``tag`` or ``tag2``, ``tagpid`` of syslog;
``level`` or its ``letter``; and one time stamp: ``iso``, ``vllm`` (no year), ``syslog`` (no year), ``boot``, ``usec``.
Each is tried at the start of what is left of a line; every repetition is of a class or bounded, so a hostile line costs its length.
"""

from __future__ import annotations

ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE"
_HOST = r"[\w.-]{1,253}"
_TAG = r"(?P<tag>[\w./@()-]{1,80})(?:\[(?P<tagpid>\d+)\])?: ?"
_TAG_WITH_PID = r"(?P<tag>[\w./@()-]{1,80})\[(?P<tagpid>\d+)\]: ?"
_POD = r"[a-z0-9]+(?:-[a-z0-9]+)+"

PARENTHESIS = (
    # vLLM, Ray: (EngineCore_DP0 pid=7) (VllmWorker rank=1 pid=7) (RayWorkerWrapper pid=7, ip=10.1.2.3)
    r"\((?P<name>[\w.:<>-]{0,80})(?: rank=(?P<rank>\d+))?(?: ?pid=(?P<pid>\d+))?(?:, ip=(?P<node>[^,)]{1,60}))?\)(?: \[repeated \d+x across cluster\])? ?",
)
BRACKET = (
    # SGLang: [2025-04-11 09:20:41 DP7 TP7]; CI systems: [2026-02-24T20:21:58Z]
    rf"\[(?:(?P<iso>{ISO})|(?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d))(?P<ranks>(?: (?:DP|TP|PP|EP|ATTN_TP|MOE_EP)\d+)+)?\] ?",
    r"\[rank(?P<rank>\d+)\]:? ?",
    # torchrun --tee, mpirun
    r"\[(?:default)?\d+(?:,\d+)?\](?:<std(?:err|out)>)?: ?",
    # kubectl logs --prefix
    r"\[pod/(?P<stream>[^\]]{1,300})\] ",
    # journalctl -o short-monotonic, the kernel's ring, dmesg -T
    rf"\[ *(?P<boot>\d+\.\d+)\] {_HOST} {_TAG_WITH_PID}",
    r"\[ *(?P<boot>\d+\.\d+)\](?:\[ *[TC]\d+\])? ",
    r"\[[A-Z][a-z]{2} (?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \d{4}\] ",
    # kubetail
    rf"\[(?P<stream>{_POD})\] ",
    # llama.cpp until 2024, then loggers and the TensorRT family
    r"\[\d{10}\] ",
    rf"\[(?P<level>{_LEVEL}|debug|info|warning|error|critical) *\] ",
    r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[T[A-Za-z]*RT(?:-LLM)?\](?: \[RANK (?P<rank>\d+)\])? \[[A-Z]\] ",
    rf"\[(?:TensorRT-LLM|TM)\]\[(?P<level>{_LEVEL})\] ",
)
DASH = (
    # Python's logging in its most copied layout: 2026-01-01 10:00:00,123 - name - ERROR -
    rf"- [\w.:-]{{1,80}} - (?P<level>{_LEVEL}) - ",
)
BAR = (
    # loguru
    rf"\| (?P<level>{_LEVEL}) *\| [^|]{{1,160}} - ",
)
ANGLE = (
    # RFC 5424, then the kernel's priority
    r"<\d{1,3}>1 (?P<iso>\S{19,40}) \S{1,253} (?P<tag>\S{1,80}) (?:(?P<tagpid>\d+)|-) \S{1,80} (?:-|\[[^\]]{0,400}\]) ",
    r"<\d{1,3}>",
)
BLANK = (
    # exception groups, journalctl -o verbose, srun -l
    r" {2,8}[|+] +(?=\S)",
    r" {4}MESSAGE=",
    r" *\d{1,4}: (?=\(|\[|  |[A-Z])",
)
LETTER = (
    # vLLM: ERROR 12-16 21:40:15 [core.py:390]
    rf"(?P<level>{_LEVEL}) (?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? \[?[\w./-]{{1,120}}\.py:\d+\] ?",
    # GKE's log viewer; the level is the viewer's
    rf"(?:{_LEVEL}) (?P<iso>{ISO}) \[resource\.labels\.containerName: (?P<stream>[^\]]{{1,300}})\] ",
    rf"(?P<level>{_LEVEL}):?[ \t]+(?=\S)",
    rf"(?P<level>{_LEVEL}):[\w.]{{1,80}}:",
    # syslog, journalctl -o short and short-precise, short-full, klog, dmesg -x
    rf"(?P<syslog>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d{{1,9}})? {_HOST} {_TAG}",
    rf"[A-Z][a-z]{{2}} (?P<iso>\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d) [A-Z]{{2,5}} {_HOST} {_TAG}",
    r"(?P<letter>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]{1,120}:\d+\] ?",
    r"(?:kern|user|daemon|syslog) {1,3}:\w{1,7} {0,4}: ",
    # stern: pod container
    rf"(?P<stream>{_POD} [a-z0-9][a-z0-9-]{{0,60}}) (?=\(\w+ |\[|\{{\"|  |\d{{4}}-|(?:{_LEVEL})\b|Traceback|[\w.]{{1,80}}(?:Error|Exception): )",
    # logfmt, Compose, NCCL, bare tags, pytest
    r"time=\S{1,60} level=(?P<level>[A-Za-z]+) ",
    r"(?P<stream>[A-Za-z0-9][\w.-]{0,120}) *\| ",
    r"[\w.-]{1,120}:(?P<ncclpid>\d+):\d+ \[\d+\] ",
    r"(?P<tag>systemd|systemd-oomd|earlyoom|dockerd|kubelet|kernel)(?:\[\d+\])?: ",
    r"E {3}(?=\S)",
)
DIGIT = (
    # CRI, syslog with ISO times (only with a PID, or every "time word word:" would be one), loggers
    rf"(?P<iso>{ISO}) std(?:out|err) [PF] ",
    rf"(?P<iso>\d{{4}}-\d\d-\d\dT\S{{8,30}}) {_HOST} (?:(?P<tag>kernel): ?|(?P<tag2>[\w./@()-]{{1,80}})\[(?P<tagpid>\d+)\]: ?)",
    rf"(?P<iso>{ISO})\s+",
    # llama.cpp, /dev/kmsg, pm2, srun -l
    r"\d+\.\d\d\.\d{3}\.\d{3} (?P<letter>[DIWE]) +(?:(?:srv|slot|cmn|que|main) +)?",
    r"\d+,\d+,(?P<usec>\d+),[^;]{0,40};",
    r"\d{1,3}\|(?P<stream>[\w.-]{1,80}) *\| ",
    r"\d{1,4}: (?=\(|\[|  |[A-Z])",
)

RELAY = r"(?:text_generation_launcher|dynamo_\w{1,60}(?:::\w{1,60}){0,4}): "
"""Programs that pass a worker's lines on: the level before it is the relay's, not the line's."""
