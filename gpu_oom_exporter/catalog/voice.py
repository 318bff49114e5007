"""Words that tell a program's own message from quoted text, advice and source code; all in the syntax of `re`."""

from __future__ import annotations

CODE = (
    r"(?:raise|return|assert|if|elif|else|except|while|for|with|import|from|def|class|throw|case|catch)\b|[})#]|//"
    r"|(?:logger|logging|log|print|warnings|self|console)\b[.(]"
    r"|[fr]?[\"'](?![\w ]{1,40}[\"'] ?:)"
    r"|[\w.\[\]]{1,80} ?=[ =]|[\w.]{1,80}\((?!\()"
)
"""How a line of source code begins; such lines stand in tracebacks, indented by four or more."""

REQUEST_LOGGER = (
    r"received request|generated response|(?:generate|embedding)reqinput|<\|user|<\|im_start|messages?[\"']? ?[:=] ?\["
    r"|[\"']content[\"'] ?:"
)
"""What request loggers of engines and gateways print before a user's or a model's text."""

QUOTED = (
    REQUEST_LOGGER + r"|\"(?:get|post|put|head|patch|delete|options) [^\"]{0,2000}(?:http/\d|$)"
    r"|^[$>] |\bgrep\b|\becho [\"']|^[a-z_]{3,40}=$|\[bugfix\]|\^\.\*"
)
"""What stands before text that is never the program's own: request loggers, access logs, shell lines."""

TEXT_KEY = (
    r"\buser (?:asks|says|wrote)\b|\b(?:prompts?|content|inputs?|input_text|text|quer(?:y|ies)|question|user|outputs?|answer|completion|response"
    r"|instruction|transcript|comment|title|subject|summary|description|annotations?|expr|default|regex|pattern)[\"']? ?[:=] ?"
)
"""A key whose value is somebody's text."""

PERHAPS_QUOTED = (
    r"\bprompts?\b|\bfix(?:ed|es)? |\bcurl\b"
    r"|\btest_\w+ ?(?:\(|\.\.\.|passed|failed)|\bregex\b"
    r"|\b(?:avoid|prevent|faq|e\.g\.|such as|for example|how to|hint:|tip:|in case of)\b"
    r"|\b(?:if|when) you (?:see|get|hit|encounter|run)|\b(?:may|can|could|might) (?:cause|lead|result|fail)"
    r"|\bsee (?:the|section|also)\b"
)
"""The same where it depends: a program that fails on a prompt names the prompt, too."""

LISTED = r"^(?:[*-]|#+) |^(?:[0-9a-f]{7,12} )?fix(?:ed|es)? "
"""How an entry of a list, a headline or a commit's title begins."""

FAILING = (
    r"\b(?:errors?|err|failed|fails?|failure|exception|fatal|critical|panic\w*|cannot|could not|unable|crash\w*)\b"
)
"""Words with which a program reports its own failure."""

OWN_QUOTE = (
    r"(?:err|errs|exc|msg|message|reason|cause|detail|desc|fail|failure|panicked at|panic|stderr|status|event"
    r"|generation|warmup|backend|\w{0,60}(?:errors?|exception|failed))[\"']?[\s:=(\\]*(?:error)?[\s:=(\\]*$"
)
"""What may open a quote that still is the program's own words."""

QUIET = r"\| ?(?:info|debug|trace) *\||- (?:info|debug|trace) - |\[(?:info|debug|trace) *\]|\b(?:level|lvl|severity)=\"?(?:info|debug|dbug|trace)\b"
"""A level of other loggers' layouts that is no alarm: loguru, logging's dashes, structlog, logfmt."""

ERROR_KEY = r"\berr(?:or)?=\""
"""In a logfmt line of level INFO, only the value of such a key reports a failure."""

OVERCOME = r"ignoring this choice"
"""What an autotuner prints behind a failure, at level ERROR too; it takes another kernel."""

FORGIVEN = OVERCOME + r"|decreasing batch size|retrying (?:after|with)\b|handled, "
"""What stands behind a failed allocation that the program got over, below level ERROR."""

LEVEL_KEYS = ("levelname", "log.level", "severityText", "severity", "level", "Level", "lvl")
TEXT_KEYS = (
    "logger", "message", "msg", "Message", "body", "text", "error", "err", "error.message", "event", "exception", "exc_info",
    "exc_text", "stack", "stacktrace", "stack_trace", "traceback",
)  # fmt: skip
"""Where structured loggers put the level and the text."""

SHIPPERS = (
    ("line", "labels", ""),  # Loki
    ("textPayload", "resource", "type"),  # Google Cloud
    ("short_message", "host", ""),  # GELF
    ("message", "source_type", ""),  # Vector
    ("message", "agent", "type"),  # Filebeat
)
"""(key of the line, key beside it, key within that) of log shippers whose records hold a line as the program wrote it."""
