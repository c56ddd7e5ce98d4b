"""Imported last by the process that workers are forked from: the workers hear Ctrl-C again."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
